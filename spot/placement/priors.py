"""Spatial priors: where tokens go before the model has looked (paper, "Spatial Priors").

A prior maps images (B, C, H, W) to positions (B, N, 2): one (y, x) per token, as a fraction of
height and width, so (0.5, 0.5) is the middle. Every prior gives exactly N tokens for any N ≥ 1 and
any image shape, inside Ω, the paper's Ω_subpix: the rectangle from the first pixel's centre to the last's.

To add a prior, write a function of this signature and list it in PRIORS; fixed priors ignore the
generator. Numbers are drawn on the CPU, so that one seed gives one placement on every device.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from spot.errors import InputError, unknown

Prior = Callable[[Tensor, int, Generator | None], Tensor]
Saliency = Callable[[Tensor], Tensor]

GAUSSIAN_WIDTH = 1 / math.pi  # standard deviation of the gaussian prior, as a fraction of each side
CENTER_WIDTH = 0.3  # how far from the middle the center prior still pulls, as a fraction of each side
FOCUS_BLUR = 1 / 7  # width of the mean that the focus prior takes of its map, as a fraction of each side
BOUNDARY_DEPTH = 0.1  # the boundary prior stays within this fraction of each side


def uniform(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """Every location is equally likely."""
    low, high = omega(images)
    return torch.lerp(low, high, _random(images, tokens, 2, generator=generator).to(images.device))


def gaussian(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """A normal distribution around the middle, of standard deviation GAUSSIAN_WIDTH, cut off at Ω."""
    # Through the inverse distribution function: clamping would pile a tenth of the tokens on the edges.
    edge = math.erf(0.5 / GAUSSIAN_WIDTH / math.sqrt(2))
    spread = torch.erfinv((2 * _random(images, tokens, 2, generator=generator).double() - 1) * edge)
    return _into_omega((0.5 + spread * (GAUSSIAN_WIDTH * math.sqrt(2))).float(), images)


def sobol(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """Quasirandom coverage: a scrambled Sobol sequence per image, whose first n points place n tokens."""
    check_tokens(tokens)
    _check_generator(generator)
    # Scrambling as in SobolEngine(scramble=True), a random triangular bit matrix and a digital shift,
    # for all images at once: an engine per image would cost more than reading the tokens.
    bits = 24
    scramble = torch.randint(2, (len(images), 2, bits, bits), generator=generator).tril(-1) + torch.eye(bits)
    shift = torch.randint(2, (len(images), 1, 2, bits), generator=generator)
    powers = 0.5 ** torch.arange(1, bits + 1, dtype=torch.float64)
    points = SobolEngine(2).draw(tokens, dtype=torch.float64)
    digits = torch.floor(points[..., None] / powers) % 2  # (N, 2, bits), most significant first
    digits = (torch.einsum("bdij,ndj->bndi", scramble, digits.float()) + shift) % 2
    return _into_omega(digits.double() @ powers + powers[-1] / 2, images)


def isotropic(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """Even coverage: each token is the middle of a cell of equal area; N a full grid gives that grid."""
    height, width = images.shape[-2:]
    placement = _into_omega(_even(tokens, height, width), images)
    return placement.expand(len(images), -1, -1).clone()


def center(images: Tensor, tokens: int, generator: Generator | None = None, *, full: int = 196) -> Tensor:
    """Even coverage drawn towards the middle, the more so the fewer tokens there are.

    An offset d from the middle becomes d · (1 − b · exp(−(d / CENTER_WIDTH)²)), with b = 1 − tokens / full:
    none of a full grid's `full` tokens can move without leaving a hole, so the bias fades towards it.
    """
    offset = isotropic(images, tokens) - 0.5
    bias = max(0.0, 1 - tokens / full)
    return 0.5 + offset * (1 - bias * torch.exp(-((offset / CENTER_WIDTH) ** 2)))


def boundary(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
    """Only the frame: uniform along the image's edges, within BOUNDARY_DEPTH of them (paper, robustness)."""
    height, width = images.shape[-2:]
    along, depth, side, far = _random(images, tokens, 4, generator=generator).unbind(-1)
    across = torch.where(far < 0.5, depth * BOUNDARY_DEPTH, 1 - depth * BOUNDARY_DEPTH)
    vertical = side < height / (height + width)  # a left or right edge
    positions = torch.stack([torch.where(vertical, along, across), torch.where(vertical, across, along)], -1)
    return _into_omega(positions, images)


def salient(saliency: Saliency | Tensor) -> Prior:
    """A prior that draws tokens from a saliency map's density, subpixel within the pixel.

    saliency: maps (B, H, W) in [0, 1], or a function images (B, C, H, W) → maps.
    """

    def prior(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
        return _from_density(_maps(saliency, images), images, tokens, generator)

    return prior


def focus(saliency: Saliency | Tensor) -> Prior:
    """Even coverage drawn towards what is salient: isotropic's tokens, moved until each has an equal share.

    Half of what is shared out is the saliency, blurred by FOCUS_BLUR so that its edges do not matter, and half is the
    plain area, so that the rest of the image is still seen. Tokens drawn from a map, as `salient` has them, fall on
    each other; these keep their distance. A flat map gives isotropic.
    """

    def prior(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
        density = _maps(saliency, images).detach().cpu().double().clamp(min=0)
        for axis in (1, 2):
            density = _blurred(density, axis, max(1, round(FOCUS_BLUR * density.shape[axis])))
        density = density / _total(density)[:, None, None] + 1 / density[0].numel()
        return _into_omega(_shared_out(density, _even(tokens, *images.shape[-2:])[0].double()), images)

    return prior


def background(saliency: Saliency | Tensor) -> Prior:
    """A prior that draws tokens where a saliency map is low: from 1 − map (paper, robustness)."""

    def prior(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
        return _from_density(1 - _maps(saliency, images), images, tokens, generator)

    return prior


PRIORS: dict[str, Prior] = {
    "uniform": uniform,
    "gaussian": gaussian,
    "sobol": sobol,
    "isotropic": isotropic,
    "center": center,
    "boundary": boundary,
}

SALIENT_PRIORS: dict[str, Callable[[Saliency | Tensor], Prior]] = {
    "salient": salient,
    "focus": focus,
    "background": background,
}


def resolve_prior(prior: str | Prior, saliency: Saliency | Tensor | None = None) -> Prior:
    """The prior of a name, or the function itself. salient, focus and background need a saliency."""
    if not isinstance(prior, str):
        return prior
    if prior in SALIENT_PRIORS:
        if saliency is None:
            raise InputError(f"the {prior} prior reads a saliency map; pass priors.{prior}(saliency)")
        return SALIENT_PRIORS[prior](saliency)
    if prior not in PRIORS:
        raise unknown("prior", prior, [*PRIORS, *SALIENT_PRIORS])
    return PRIORS[prior]


def omega(images: Tensor) -> tuple[Tensor, Tensor]:
    """The corners of Ω, (2,) each: the first and the last pixel's centre, as (y, x) fractions."""
    half = 0.5 / torch.tensor(images.shape[-2:], dtype=torch.float32, device=images.device)
    return half, 1 - half


def check_tokens(tokens: int) -> None:
    """Refuse a budget that is not a whole number of at least one token."""
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InputError(f"tokens must be a whole number of at least 1, got {tokens!r}")


def _check_generator(generator: Generator | None) -> None:
    if generator is not None and generator.device.type != "cpu":
        raise InputError(f"generator must be on the CPU, got {generator.device}; use torch.Generator().manual_seed(n)")


def _random(images: Tensor, tokens: int, numbers: int, *, generator: Generator | None) -> Tensor:
    """Uniform numbers in [0, 1) for every image and token, on the CPU: (B, N, numbers)."""
    check_tokens(tokens)
    _check_generator(generator)
    return torch.rand(len(images), tokens, numbers, generator=generator)


def _into_omega(positions: Tensor, images: Tensor) -> Tensor:
    """Keep positions in Ω, float32, on the images' device: float16 would round to 0.1 pixel."""
    low, high = omega(images)
    return positions.to(images.device, torch.float32).clamp(low, high)


def _even(tokens: int, height: int, width: int) -> Tensor:
    """tokens positions (1, N, 2) in rows over a height × width rectangle, each in a cell of equal area."""
    check_tokens(tokens)
    ideal = math.sqrt(tokens * height / width)  # rows of square cells
    rows = min(max(1, round(ideal)), tokens)
    # Row r holds tokens ends[r] to ends[r + 1] and is as high as its share of them.
    ends = [round(row * tokens / rows) for row in range(rows + 1)]
    placement = []
    for start, end in pairwise(ends):
        x = (torch.arange(end - start) + 0.5) / (end - start)
        y = torch.full_like(x, (start + end) / (2 * tokens))
        placement.append(torch.stack([y, x], -1))
    return torch.cat(placement)[None]


def _maps(saliency: Saliency | Tensor, images: Tensor) -> Tensor:
    maps = saliency if isinstance(saliency, Tensor) else saliency(images)
    if maps.ndim == 4 and maps.shape[1] == 1:
        maps = maps[:, 0]
    needed = (len(images), *images.shape[-2:])
    if tuple(maps.shape) != needed:
        raise InputError(
            f"saliency maps must have the images' size {needed}, got {tuple(maps.shape)}; resize them first"
        )
    return maps


def _from_density(density: Tensor, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
    """Draw a pixel in proportion to density (B, H, W), then a place within the pixel."""
    height, width = density.shape[-2:]
    density = density.detach().cpu().double().flatten(1).clamp(min=0)
    _total(density)  # refuses a map that leaves nothing
    draws = _random(images, tokens, 3, generator=generator)
    cumulative = density.cumsum(1)
    pixel = torch.searchsorted(cumulative, draws[..., 0].double() * cumulative[:, -1:], right=True)
    pixel = pixel.clamp(max=density.shape[1] - 1)
    corner = torch.stack([pixel // width, pixel % width], -1)
    return _into_omega((corner + draws[..., 1:]) / torch.tensor([height, width]), images)


def _total(density: Tensor) -> Tensor:
    """The sum of each density (B, ...): (B,). Refuses one with nothing in it."""
    total = density.flatten(1).sum(1)
    if not bool((total > 0).all()) or not bool(total.isfinite().all()):
        bad = int((~((total > 0) & total.isfinite())).nonzero()[0, 0])
        raise InputError(f"the saliency map of image {bad} leaves no pixel to draw from; use another prior for it")
    return total


def _blurred(density: Tensor, axis: int, width: int) -> Tensor:
    """The mean over the 2 · (width // 2) + 1 pixels around each along an axis of (B, H, W), fewer at the edges."""
    moved = density.transpose(axis, 2)
    moved = F.avg_pool1d(moved, 2 * (width // 2) + 1, 1, width // 2, count_include_pad=False)
    return moved.transpose(axis, 2)


def _shared_out(density: Tensor, places: Tensor) -> Tensor:
    """Move places (N, 2) in the unit square so that area becomes share of density (B, H, W) > 0: (B, N, 2).

    Rows of places move to where that share of the density lies above them; then, within the row of
    pixels they are in, each moves to where that share lies to its left.
    """
    height, width = density.shape[1:]
    y, row = _quantile(density.sum(2), places[:, 0].expand(len(density), -1))
    pixels = density.gather(1, row[..., None].expand(-1, -1, width))  # (B, N, W)
    x, _ = _quantile(pixels, places[None, :, 1:].expand(len(density), -1, -1))
    return torch.stack([y / height, x[..., 0] / width], -1)


def _quantile(density: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Where shares (..., M) of densities (..., L) are reached, linear within a cell, and the cell: (..., M) each."""
    below = F.pad(density.cumsum(-1), (1, 0))
    wanted = share * below[..., -1:]
    cell = (torch.searchsorted(below, wanted.contiguous(), right=True) - 1).clamp(0, density.shape[-1] - 1)
    return cell + (wanted - below.gather(-1, cell)) / density.gather(-1, cell), cell
