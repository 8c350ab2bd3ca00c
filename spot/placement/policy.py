"""A learned prior: a cheap look at the image says where it matters, and tokens go there.

    policy = spot.load_policy("vit-ti.policy.safetensors", model)   # refused for any other model
    maps = policy.maps(images)              # importance (B, R, R), each summing to 1
    positions = policy(images, 25)          # (B, 25, 2), or with sizes (B, 25, 3): a prior like any other
    model.policy = policy                   # a submodule; then prior="learned"

A look gives the logarithm of the map (B, R, R) over the whole image, whatever its shape. To add one, list it in LOOKS:

    Thumbnail       a small convolutional network on the image shrunk to 32 × 32 pixels

Positions come from the map by the rule of `focus`: isotropic's tokens, moved until each has an equal share of
importance and area. Importance counts less the more tokens there are, and not at all with as many as the grid
has cells, where even coverage is the ViT's own grid. Everything is differentiable in the weights.
`spot learn` (spot/training/learn.py) trains a policy.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from spot.errors import InputError, unknown
from spot.placement.priors import check_images, check_tokens, spread
from spot.placement.sizes import auto_scale
from spot.store import read_tensors, write_tensors

KEY, FORMAT = "spot_policy", 1
FINER = 4  # a map is interpolated to so many times its rows and columns, so that tokens do not jump at their edges


class Mixing(nn.Module):
    """A residual block on maps (B, C, R, R): each channel over 5 × 5 places, then each place over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.places = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.norm = nn.GroupNorm(1, channels)
        self.wide, self.narrow = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(self.places(x)))))


class Thumbnail(nn.Module):
    """A small convolutional network on the image shrunk to side × side pixels: maps of side / 4 cells a side."""

    def __init__(self, side: int = 32, width: int = 32, depth: int = 3, channels: int = 3) -> None:
        super().__init__()
        if side % 8 or min(side, width, depth) < 1:
            raise InputError(f"a thumbnail has a multiple of 8 pixels a side, got side {side}, width {width}")
        self.side = side
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width // 2, 3, 2, 1), nn.GELU(), nn.Conv2d(width // 2, width, 3, 2, 1)
        )
        self.down = nn.Sequential(nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 3, 2, 1))
        self.coarse = nn.Sequential(*(Mixing(2 * width) for _ in range(depth)))
        self.up = nn.Conv2d(2 * width, width, 1)
        self.fine = Mixing(width)
        self.head = nn.Conv2d(width, 1, 1)
        self.everywhere = nn.Parameter(torch.zeros(side // 4, side // 4))  # what all images have in common
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(F.adaptive_avg_pool2d(images, self.side))
        coarse = self.coarse(self.down(x))
        coarse = coarse + coarse.mean((2, 3), keepdim=True)
        x = self.fine(x + F.interpolate(self.up(coarse), scale_factor=2.0))
        return self.head(x)[:, 0] + self.everywhere


LOOKS: dict[str, type[nn.Module]] = {"thumbnail": Thumbnail}


class Policy(nn.Module):
    """A learned prior: images → importance map → positions, for any budget from `min_tokens` on."""

    random = False  # attributes that spot.placement.priors reads from any prior
    looks = True
    fit = "crop"  # how a photograph becomes its input; see spot.data.picture.photo_transform
    __name__ = "learned"

    def __init__(
        self,
        patch_size: int,
        look: str = "thumbnail",
        *,
        strength: float = 0.9,
        sizes: float = 0.0,
        min_tokens: int = 4,
        about: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            patch_size: K of the model whose tokens it places, in pixels.
            look: a name in LOOKS; options go to it.
            strength: the share of importance against area with very few tokens.
            sizes: 0 leaves sizes to the model; 1 makes a window as large as its share of the image.
            min_tokens: the smallest budget it was trained for.
            about: JSON values to keep with it: model and hash, the weights it was trained for, and how.
        """
        super().__init__()
        if look not in LOOKS:
            raise unknown("look", look, LOOKS)
        if not 0 <= strength < 1:
            raise InputError(f"strength is the share of importance, from 0 to below 1, got {strength}")
        self.look: Any = LOOKS[look](**options)
        self.patch_size, self.strength, self.sizes, self.min_tokens = patch_size, strength, sizes, min_tokens
        self.about: dict[str, Any] = {"model": "", "hash": "", "made": {}, **(about or {})}
        self.about |= {"look": look, "options": options}

    def logits(self, images: Tensor) -> Tensor:
        """The logarithm of the map (B, R, R), up to a constant."""
        check_images(images)
        if min(images.shape[-2:]) < self.patch_size:
            size = " × ".join(map(str, images.shape[-2:]))
            raise InputError(f"a picture of {size} pixels is smaller than one token ({self.patch_size}); enlarge it")
        return self.look(images)

    def maps(self, images: Tensor) -> Tensor:
        """Importance (B, R, R) over the whole image, each map summing to 1."""
        logits = self.logits(images)
        return logits.float().flatten(1).softmax(1).view_as(logits)

    def forward(self, images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
        """Positions (B, N, 2), or with sizes (B, N, 3)."""
        check_tokens(tokens)
        if tokens < self.min_tokens:
            raise InputError(f"the policy was trained for {self.min_tokens} tokens and more, got {tokens}")
        return self.place(self.maps(images), images, tokens)

    def place(self, maps: Tensor, images: Tensor, tokens: int) -> Tensor:
        """Positions for importance maps (B, R, C) of images: what a call does once it has looked."""
        height, width = images.shape[-2:]
        cells = (height // self.patch_size) * (width // self.patch_size)
        strength = self.strength * max(0.0, 1 - tokens / cells)
        # In float64 on the CPU, as `focus`: one placement on every device.
        finer = [cells * FINER for cells in maps.shape[1:]]
        rows, columns = (between((torch.arange(cells) + 0.5) / FINER, cells // FINER) for cells in finer)
        density = rows @ maps.cpu().double() @ columns.mT
        density = density / density.sum((1, 2), keepdim=True)
        positions = spread(density, strength, images, tokens)
        if not self.sizes or not strength:
            return positions
        y, x = (between(positions[..., axis].detach().cpu() * length, length) for axis, length in enumerate(finer))
        share = ((y @ density) * x).sum(-1).to(positions)
        relative = 1 - strength + strength * share * density.shape[1:].numel()  # 1 where coverage is even
        scale = auto_scale(tokens, height, width, self.patch_size) * relative ** (-self.sizes / 2)
        largest = max(1.0, min(height, width) / self.patch_size)
        return torch.cat([positions, scale.clamp(0.5, largest)[..., None]], -1)

    def save(self, path: str | Path) -> None:
        """Write the policy by itself: a safetensors file that names the weights it was trained for."""
        write_tensors(path, self.look.state_dict(), KEY, {"format": FORMAT, **self.describe()})

    def describe(self) -> dict[str, Any]:
        """What is needed to build the policy again: JSON values only."""
        how = {"strength": self.strength, "sizes": self.sizes, "fewest": self.min_tokens}  # "fewest": as 0.2 wrote it
        return {**self.about, **how, "patch_size": self.patch_size}


def between(places: Tensor, cells: int) -> Tensor:
    """Bilinear interpolation along an axis of so many cells: how much each counts at places (..., M), in cells.

    (..., M, cells). Products with it instead of F.interpolate and F.grid_sample, so that exported graphs are simple.
    """
    at = (places.double() - 0.5).clamp(0, cells - 1)
    return (1 - (at[..., None] - torch.arange(cells)).abs()).clamp(min=0)


def is_policy_file(prior: Any) -> bool:
    """Whether a prior is given as the file of a policy."""
    return isinstance(prior, (str, Path)) and str(prior).endswith(".safetensors")


def read_policy_file(path: str | Path, patch_size: int = 16) -> Policy:
    """The policy that `spot learn` wrote. For which weights it was trained is in `about`; see `spot.load_policy`.

    patch_size: of the model, for files of version 0.2, which do not say it.
    """
    state, about = read_tensors(path, KEY, "a policy, as spot learn writes it")
    if about.get("format") != FORMAT:
        raise InputError(f"{path} is a policy in format {about.get('format')!r}; this version reads {FORMAT}")
    about = {"patch_size": patch_size, **about}
    policy = policy_from(about, {f"look.{name}": tensor for name, tensor in state.items()}, str(path))
    policy.__name__ = Path(path).name
    return policy


def policy_from(about: Mapping[str, Any], state: Mapping[str, Tensor], path: str) -> Policy:
    """The policy that `describe` and its weights stand for, frozen; a sentence that names the file if it is damaged."""
    try:
        policy = build_policy(about)
        policy.load_state_dict(state)
    except InputError as error:
        raise InputError(f"{path} cannot be used: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path} is a damaged policy: {str(error).splitlines()[0]}") from error
    return policy


def build_policy(about: Mapping[str, Any]) -> Policy:
    """A policy as `describe` says, with fresh weights that are not trained further unless one asks for it."""
    if about["look"] == "glimpses":
        from spot.placement.finder import build_finder  # which is made of this module's policies

        return build_finder(about)
    if about["look"] not in LOOKS:
        raise InputError(f"its look {about['look']!r} was removed in version 0.3; train it again with spot learn")
    known = {name: about[name] for name in ("model", "hash", "made")}
    how: dict[str, Any] = {name: about[name] for name in ("strength", "sizes", "patch_size")}
    policy = Policy(look=about["look"], min_tokens=about["fewest"], about=known, **how, **about["options"])
    return policy.eval().requires_grad_(False)
