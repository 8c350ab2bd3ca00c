"""Spatial priors: positions of tokens before the forward pass (paper, "Spatial Priors").

A prior maps images (B, C, H, W) to positions (B, N, 2): one (y, x) per token, as a fraction of
height and width, so (0.5, 0.5) is the middle. Every prior gives exactly N tokens for any N ≥ 1 and
any image shape, inside Ω, the paper's Ω_subpix: the rectangle from the first pixel's centre to the last's.

    PRIORS["uniform"](images, 25, generator)          drawn from a generator, for the whole batch
    PRIORS["uniform"](images, 25, keys=names, seed=1) each image's tokens from (seed, key) alone
    PRIORS["focus"](images, 25, maps=maps)            from saliency maps (B, H, W)

To add a prior, write a function (images, tokens, generator) and list it in PRIORS. Such a function is also accepted
instead of a name. Random numbers are drawn on the CPU, so that a seed gives the same positions on every device.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from spot.draws import generator_for
from spot.errors import InputError, check_kind, unknown
from spot.tokens.positions import check_positions

GAUSSIAN_WIDTH = 1 / math.pi  # standard deviation of the gaussian prior, as a fraction of each side
CENTER_WIDTH = 0.3  # width of the center prior's pull towards the middle, as a fraction of each side
FOCUS_BLUR = 1 / 7  # width of the focus prior's box blur, as a fraction of each side
FOCUS_SHARE = 0.5  # weight of saliency in the focus prior; the rest is area
SOFTNESS = 4.0  # temperature of salient-soft: maps are raised to the power of 1 / SOFTNESS
MAX_TOKENS = 1_000_000  # a limit that protects the memory
LEARNED = "learned"  # a model's policy (spot/placement/policy.py)
BOUNDARY_DEPTH = 0.1  # the boundary prior stays within this fraction of each side


def uniform(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """Every location is equally likely."""
    low, high = omega(images)
    return torch.lerp(low, high, torch.rand(len(images), tokens, 2, generator=generator).to(images.device))


def gaussian(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """A normal distribution around the middle, with standard deviation GAUSSIAN_WIDTH, truncated to Ω."""
    # Sampled with the inverse CDF: clamping would put a tenth of the tokens on the edges.
    edge = math.erf(0.5 / GAUSSIAN_WIDTH / math.sqrt(2))
    spread = torch.erfinv((2 * torch.rand(len(images), tokens, 2, generator=generator).double() - 1) * edge)
    return _into_omega((0.5 + spread * (GAUSSIAN_WIDTH * math.sqrt(2))).float(), images)


def sobol(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """Quasirandom coverage: a scrambled Sobol sequence per image, whose first n points place n tokens."""
    # The scrambling of SobolEngine(scramble=True), a random triangular bit matrix and a digital shift, for all images
    # at once: one engine per image would cost more than the tokenizer.
    bits = 24
    scramble = torch.randint(2, (len(images), 2, bits, bits), generator=generator).tril(-1) + torch.eye(bits)
    shift = torch.randint(2, (len(images), 1, 2, bits), generator=generator)
    powers = 0.5 ** torch.arange(1, bits + 1, dtype=torch.float64)
    points = SobolEngine(2).draw(tokens, dtype=torch.float64)
    digits = torch.floor(points[..., None] / powers) % 2  # (N, 2, bits), most significant first
    digits = (torch.einsum("bdij,ndj->bndi", scramble, digits.float()) + shift) % 2
    return _into_omega(digits.double() @ powers + powers[-1] / 2, images)


def isotropic(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """Even coverage: each token is the middle of a cell of equal area. If N fills a grid, it is that grid."""
    height, width = images.shape[-2:]
    placement = isotropic_positions(tokens, height, width).to(images.device)
    if tokens > min(height, width):  # a cell may be smaller than a pixel
        placement = _into_omega(placement, images)
    return placement.expand(len(images), -1, -1).clone()


def center(images: Tensor, tokens: int, generator: Generator | None = None, *, cells: int = 196) -> Tensor:
    """Even coverage pulled towards the middle, more strongly for fewer tokens.

    An offset d from the middle becomes d · (1 − b · exp(−(d / CENTER_WIDTH)²)), with b = 1 − tokens / cells. A full
    grid has no bias b, because moving its tokens would leave gaps.
    """
    return _towards_middle(isotropic(images, tokens), max(0.0, 1 - tokens / cells), CENTER_WIDTH)


def boundary(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """Only the border: uniform along the image's edges, within BOUNDARY_DEPTH of them (paper, robustness)."""
    height, width = images.shape[-2:]
    along, depth, side, far = torch.rand(len(images), tokens, 4, generator=generator).unbind(-1)
    across = torch.where(far < 0.5, depth * BOUNDARY_DEPTH, 1 - depth * BOUNDARY_DEPTH)
    vertical = side < height / (height + width)  # a left or right edge
    positions = torch.stack([torch.where(vertical, along, across), torch.where(vertical, across, along)], -1)
    return _into_omega(positions, images)


def center_authors(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """The authors' center prior: the same pull, of width 0.2, for any number of tokens, also for a full grid."""
    return _towards_middle(isotropic(images, tokens), 1.0, 0.2)


def _towards_middle(positions: Tensor, bias: float, width: float) -> Tensor:
    offset = positions - 0.5
    return 0.5 + offset * (1 - bias * torch.exp(-((offset / width) ** 2)))


def boundary_authors(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """The authors' boundary prior: both coordinates are near an edge, so most tokens are in the corners."""
    u = 2 * torch.rand(len(images), tokens, 2, generator=generator) - 1
    return _into_omega(((1 + u.sign() * (1 - u.abs() ** 10)) / 2).clamp(0.01, 0.99), images)


def salient(images: Tensor, tokens: int, generator: Generator | None = None, *, maps: Tensor) -> Tensor:
    """Drawn in proportion to saliency maps (B, H, W) in [0, 1], and uniformly within each pixel."""
    return _sampled(maps, images, tokens, generator)


def salient_distinct(
    images: Tensor, tokens: int, generator: Generator | None = None, *, maps: Tensor, cells: int = 196
) -> Tensor:
    """As salient, but draws from the `cells` cells of an even grid without replacement, so tokens do not share a cell.

    Cells are drawn in proportion to their saliency, positions within a cell uniformly. With more tokens than cells,
    drawing starts again with all cells.
    """
    height, width = images.shape[-2:]
    rows = max(1, round(math.sqrt(cells * height / width)))
    grid = (rows, max(1, round(cells / rows)))
    mass = F.adaptive_avg_pool2d(maps.detach().cpu().double().clamp(min=0)[:, None], grid).flatten(1)
    _total(mass)  # refuses a map that leaves nothing
    count = mass.shape[1]
    rounds = -(-tokens // count)
    draws = torch.rand(len(images), max(tokens, rounds * count), 3, generator=generator).double()
    # Gumbel top-k: the N largest keys are a draw without replacement. Empty cells come last, in random order.
    noise = -torch.log(-torch.log(draws[:, : rounds * count, 0].clamp(1e-12, 1 - 1e-12)))
    keys = (mass / mass.sum(1, keepdim=True)).clamp(min=1e-12).log().repeat(1, rounds) + noise
    order = keys.unflatten(1, (rounds, count)).argsort(-1, descending=True).flatten(1)[:, :tokens]
    corner = torch.stack([order // grid[1], order % grid[1]], -1)
    return _into_omega((corner + draws[:, :tokens, 1:]) / torch.tensor(grid), images)


def salient_soft(images: Tensor, tokens: int, generator: Generator | None = None, *, maps: Tensor) -> Tensor:
    """As salient, with maps raised to the power of 1 / SOFTNESS, which gives nearly binary maps intermediate values."""
    return _sampled(maps.clamp(min=0) ** (1 / SOFTNESS), images, tokens, generator)


def focus(images: Tensor, tokens: int, generator: Generator | None = None, *, maps: Tensor) -> Tensor:
    """Even coverage pulled towards salient regions: isotropic tokens, moved until each has an equal share.

    Shares are measured on a mixture of blurred saliency and area, so some tokens always cover the rest of the image.
    Tokens drawn from a map, as in `salient`, overlap; these do not. A constant map gives isotropic.
    """
    density = maps.detach().cpu().double().clamp(min=0)[:, None]
    y, x = (round(FOCUS_BLUR * length) // 2 for length in density.shape[2:])  # reach of the box blur, in pixels
    density = F.avg_pool2d(density, (2 * y + 1, 1), 1, (y, 0), count_include_pad=False)
    density = F.avg_pool2d(density, (1, 2 * x + 1), 1, (0, x), count_include_pad=False)[:, 0]
    return equal_shares(density / _total(density)[:, None, None], FOCUS_SHARE, images, tokens)


def equal_shares(density: Tensor, weight: float, images: Tensor, tokens: int) -> Tensor:
    """Move isotropic tokens until each has an equal share of a mixture: positions (B, N, 2), differentiable.

    The mixture is `weight` times density (B, R, C), whose sum is 1, plus 1 − `weight` times uniform area. A token
    (y, x) moves to the height that has the share y of the mixture above it. Within that row of cells, it moves to
    where the share x of the row's mixture lies to its left.
    """
    batch, rows, columns = density.shape
    mixture = weight * density + (1 - weight) / density.shape[1:].numel()
    places = isotropic_positions(tokens, *images.shape[-2:])[0].to(mixture)  # (N, 2)
    y, row = _quantile(mixture.sum(2), places[:, 0].expand(batch, -1))
    cells = mixture.gather(1, row[..., None].expand(-1, -1, columns))  # (B, N, C)
    x, _ = _quantile(cells, places[None, :, 1:].expand(batch, -1, -1))
    return _into_omega(torch.stack([y / rows, x[..., 0] / columns], -1), images)


def background(images: Tensor, tokens: int, generator: Generator | None = None, *, maps: Tensor) -> Tensor:
    """Drawn where saliency maps are low: from 1 − map (paper, robustness)."""
    return _sampled(1 - maps, images, tokens, generator)


@dataclass(frozen=True)
class Prior:
    """A prior by name: called with images and a number of tokens, it gives positions (B, N, 2)."""

    name: str
    draw: Callable[..., Tensor]
    random: bool = False  # positions depend on the seed
    needs_map: bool = False  # needs saliency maps
    even_when_full: bool = False  # gives even coverage when there are as many tokens as grid cells
    learned: bool = False  # a placeholder for a model's policy; see SpotViT.resolved_prior

    @property
    def uses_image(self) -> bool:
        """Whether positions depend on the content of the image."""
        return self.needs_map or self.learned or getattr(self.draw, "uses_image", False)

    def __call__(
        self,
        images: Tensor,
        tokens: int,
        generator: Generator | None = None,
        *,
        keys: Sequence[str] | None = None,
        seed: int = 0,
        maps: Tensor | None = None,
        cells: int = 196,
    ) -> Tensor:
        """Positions (B, N, 2), drawn from the generator or, with keys, each image's from (seed, key) alone.

        Args:
            maps: saliency (B, H, W) in [0, 1], for a prior that needs it.
            cells: number of cells of the model's own grid.
        """
        check_images(images)
        check_tokens(tokens)
        check_kind("generator", generator, Generator, type(None), advice="use torch.Generator().manual_seed(n)")
        if generator is not None and generator.device.type != "cpu":
            raise InputError(f"generator must be on the CPU, got {generator.device}; use torch.Generator()")
        options = {"cells": cells} if self.even_when_full else {}
        if not self.needs_map:
            maps = None
        elif maps is None:
            raise InputError(f"the {self.name} prior needs saliency maps; pass maps=(B, H, W), or let a model place")
        else:
            maps = check_maps(maps, images)

        def place(rows: slice, generator: Generator | None) -> Tensor:
            extra = options if maps is None else {**options, "maps": maps[rows]}
            return self.draw(images[rows], tokens, generator, **extra)

        count = images.shape[0]  # not len(): it would fix the batch when traced
        positions = draw_rows(place, count, generator, keys if self.random else None, seed)
        if not isinstance(positions, Tensor) or positions.ndim != 3 or positions.shape[1] != tokens:
            got = tuple(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
            raise InputError(f"the prior {self.name} must give positions ({len(images)}, {tokens}, 2), got {got}")
        if PRIORS.get(self.name) is not self:  # a user's function, or a policy
            check_positions(positions)
        return positions


AnyPrior = str | Callable[[Tensor, int, Generator | None], Tensor]  # a name in PRIORS, or a function

PRIORS: dict[str, Prior] = {
    prior.name: prior
    for prior in (
        Prior("uniform", uniform, random=True),
        Prior("gaussian", gaussian, random=True),
        Prior("sobol", sobol, random=True),
        Prior("isotropic", isotropic),
        Prior("center", center, even_when_full=True),
        Prior("boundary", boundary, random=True),
        Prior("center-authors", center_authors),
        Prior("boundary-authors", boundary_authors, random=True),
        Prior("salient", salient, random=True, needs_map=True),
        Prior("salient-distinct", salient_distinct, random=True, needs_map=True, even_when_full=True),
        Prior("salient-soft", salient_soft, random=True, needs_map=True),
        Prior("focus", focus, needs_map=True),
        Prior("background", background, random=True, needs_map=True),
    )
}


def resolve_prior(prior: AnyPrior) -> Prior:
    """Look up a prior by name, or wrap a function (images, tokens, generator), random unless its `random` is False.

    "learned" needs a model; see SpotViT.resolved_prior.
    """
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, str):
        if prior == LEARNED:
            return Prior(prior, _without_model, learned=True)
        if prior.endswith(".safetensors"):
            raise InputError(f"{prior} is the file of a policy; load it with spot.load_policy(file, model) first")
        if prior not in PRIORS:
            raise unknown("prior", prior, (*PRIORS, LEARNED), hint="or give the file of a policy that spot learn wrote")
        return PRIORS[prior]
    name = getattr(prior, "__name__", type(prior).__name__)
    if not callable(prior):
        raise InputError(f"a prior is a name in spot.PRIORS or a function of (images, tokens, generator), got {name}")
    try:
        inspect.signature(prior).bind(None, 1, None)
    except TypeError as error:
        raise InputError(f"a prior is a function of (images, tokens, generator), but {name} is not: {error}") from None
    return Prior(name, prior, random=getattr(prior, "random", True))


def _without_model(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    raise InputError("a learned prior places tokens for its model; use model.place, or model.policy itself")


def draw_rows(
    draw: Callable[[slice, Generator | None], Tensor],
    count: int,
    generator: Generator | None,
    keys: Sequence[str] | None,
    seed: int,
) -> Tensor:
    """Call draw(rows, generator) once for all rows, or with keys once per row, with the row's own random numbers."""
    if keys is None or not count:
        return draw(slice(None), generator)
    check_kind("keys", keys, Sequence, advice="a name for each image")
    check_kind("seed", seed, int)
    for key in keys:
        check_kind("a key", key, str, advice="each image has its name")
    if len(keys) != count:
        raise InputError(f"each image needs its key, got {len(keys)} keys for {count} images")
    return torch.cat([draw(slice(row, row + 1), generator_for(seed, key)) for row, key in enumerate(keys)])


def omega(images: Tensor) -> tuple[Tensor, Tensor]:
    """The corners of Ω, (2,) each: the first and the last pixel's centre, as (y, x) fractions."""
    half = 0.5 / torch.tensor(images.shape[-2:], dtype=torch.float32, device=images.device)
    return half, 1 - half


def check_tokens(tokens: int) -> None:
    """Refuse a budget that is not a whole number of at least one token."""
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MAX_TOKENS:
        raise InputError(f"tokens must be a whole number of at least 1 and at most {MAX_TOKENS}, got {tokens!r}")


def check_images(images: Tensor) -> None:
    """Refuse anything but a batch of images with at least one pixel."""
    check_kind("images", images, Tensor, advice="for a picture use model.transform()(picture)[None]")
    if images.is_complex():
        raise InputError(f"images must be real numbers, got {images.dtype}")
    if images.ndim != 4 or 0 in images.shape[1:]:
        raise InputError(f"images must have shape (B, C, H, W) and at least one pixel, got {tuple(images.shape)}")


def _into_omega(positions: Tensor, images: Tensor) -> Tensor:
    """Clamp positions to Ω, in float32 on the images' device; float16 would round to 0.1 pixel."""
    low, high = omega(images)
    return positions.to(images.device, torch.float32).clamp(low, high)


def isotropic_positions(tokens: int, height: int, width: int) -> Tensor:
    """Positions (1, N, 2), N = tokens, in rows over a height × width rectangle, each in a cell of equal area."""
    ideal = math.sqrt(tokens * height / width)  # rows of square cells
    rows = min(max(1, round(ideal)), tokens)
    # Row r has tokens ends[r] to ends[r + 1], and a height in proportion to their number.
    ends = [round(row * tokens / rows) for row in range(rows + 1)]
    places = [
        ((start + end) / (2 * tokens), (column + 0.5) / (end - start))
        for start, end in pairwise(ends)
        for column in range(end - start)
    ]
    return torch.tensor(places)[None]


def check_maps(maps: Tensor, images: Tensor) -> Tensor:
    """Refuse saliency maps that are not (B, H, W) real numbers for images (B, C, H, W). Masks become numbers."""
    check_kind("maps", maps, Tensor)
    needed, shape = (len(images), *images.shape[-2:]), tuple(maps.shape)
    if shape != needed or maps.is_complex():
        raise InputError(f"saliency maps must be real and have the images' size {needed}, got {shape}, {maps.dtype}")
    return maps if maps.is_floating_point() else maps.float()


def _sampled(density: Tensor, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
    """Draw a pixel in proportion to density (B, H, W), then a uniform position within the pixel."""
    height, width = density.shape[-2:]
    density = density.detach().cpu().double().flatten(1).clamp(min=0)
    _total(density)  # refuses a map that leaves nothing
    draws = torch.rand(len(images), tokens, 3, generator=generator)
    _, pixel = _quantile(density, draws[..., 0].double())
    corner = torch.stack([pixel // width, pixel % width], -1)
    return _into_omega((corner + draws[..., 1:]) / torch.tensor([height, width]), images)


def _total(density: Tensor) -> Tensor:
    """The sum of each density (B, ...): (B,). Refuses a density without positive values."""
    total = density.flatten(1).sum(1)
    good = (total > 0) & total.isfinite()
    if not good.all():
        bad = int((~good).nonzero()[0])
        raise InputError(f"the saliency map of image {bad} leaves no pixel to draw from; use another prior for it")
    return total


def _quantile(density: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Quantiles of densities (..., L) at shares (..., M), linear within a cell, and their cells: (..., M) each."""
    below = F.pad(density.cumsum(-1), (1, 0))
    wanted = share * below[..., -1:]
    # Counts the edges below, because exported graphs have no searchsorted.
    cell = ((below[..., None, :] <= wanted[..., None]).sum(-1) - 1).clamp(0, density.shape[-1] - 1)
    return cell + (wanted - below.gather(-1, cell)) / density.gather(-1, cell), cell
