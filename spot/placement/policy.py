"""A learned prior: a small network predicts an importance map from a thumbnail, and tokens follow the map.

    policy = spot.load_policy("vit-ti.policy.safetensors", model)   # refused for any other model
    maps = policy.maps(images)              # importance (B, R, R), each summing to 1
    positions = policy(images, 25)          # (B, 25, 2): a prior like any other
    model.policy = policy                   # a submodule; then prior="learned"

Positions follow the map as in `focus`: isotropic tokens are moved until each has an equal share of importance and area.
With more tokens, importance has less weight. At the grid's number of tokens, positions are the ViT's own grid.
Positions are differentiable in the policy's weights. `spot learn` (spot/training/learn.py) trains a policy.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from spot.errors import InputError
from spot.placement.priors import check_images, check_tokens, equal_shares
from spot.store import read_tensors, write_tensors

KEY, FORMAT = "spot_policy", 1
FINER = 4  # upsampling factor of maps, so that tokens do not jump at cell edges


class Mixing(nn.Module):
    """A residual block on maps (B, C, R, R): a depthwise 5 × 5 convolution, then an MLP over channels."""

    def __init__(
        self,
        channels: int,
        norm: Callable[[int], nn.Module] = lambda channels: nn.GroupNorm(1, channels),
        activation: Callable[[Tensor], Tensor] = F.gelu,
        **around: Any,
    ) -> None:
        super().__init__()
        self.places = nn.Conv2d(channels, channels, 5, groups=channels, **{"padding": 2, **around})
        self.norm, self.activation = norm(channels), activation
        self.wide, self.narrow = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.activation(self.wide(self.norm(self.places(x)))))


class Thumbnail(nn.Module):
    """A small convolutional network on the image shrunk to side × side pixels: maps of side / 4 cells a side."""

    def __init__(self, side: int = 32, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        if side % 8 or min(side, width, depth) < 1:
            raise InputError(f"a thumbnail has a multiple of 8 pixels a side, got side {side}, width {width}")
        self.side = side
        self.stem = nn.Sequential(nn.Conv2d(3, width // 2, 3, 2, 1), nn.GELU(), nn.Conv2d(width // 2, width, 3, 2, 1))
        self.down = nn.Sequential(nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 3, 2, 1))
        self.coarse = nn.Sequential(*(Mixing(2 * width) for _ in range(depth)))
        self.up = nn.Conv2d(2 * width, width, 1)
        self.fine = Mixing(width)
        self.head = nn.Conv2d(width, 1, 1)
        self.everywhere = nn.Parameter(torch.zeros(side // 4, side // 4))  # a bias, the same for all images
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(F.adaptive_avg_pool2d(images, self.side))
        coarse = self.coarse(self.down(x))
        coarse = coarse + coarse.mean((2, 3), keepdim=True)
        x = self.fine(x + F.interpolate(self.up(coarse), scale_factor=2.0))
        return self.head(x)[:, 0] + self.everywhere


class Policy(nn.Module):
    """A learned prior: images → importance map → positions, for any budget of at least `min_tokens`."""

    random = False  # attributes that spot.placement.priors reads from any prior
    uses_image = True
    fit = "crop"  # how a photograph becomes its input; see spot.data.picture.evaluation_transform
    __name__ = "learned"

    def __init__(
        self,
        patch_size: int,
        *,
        strength: float = 0.9,
        min_tokens: int = 4,
        about: Mapping[str, Any] | None = None,
        look: nn.Module | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            patch_size: K of the model whose tokens it places, in pixels.
            strength: weight of importance against area with very few tokens.
            min_tokens: the smallest budget it was trained for.
            about: JSON metadata: model and hash of the weights it was trained for, and its settings.
            look: the network. Default: a Thumbnail.
            options: arguments of the network.
        """
        super().__init__()
        if not 0 <= strength < 1:
            raise InputError(f"strength is the share of importance, from 0 to below 1, got {strength}")
        self.look: Any = Thumbnail(**options) if look is None else look
        self.patch_size, self.strength, self.min_tokens, self.options = patch_size, strength, min_tokens, options
        self.about: dict[str, Any] = {"model": "", "hash": "", "made": {}, **(about or {})}

    def maps(self, images: Tensor) -> Tensor:
        """Importance (B, R, R) over the whole image, each map summing to 1."""
        self.refuse(images)
        logits = self.look(images)
        return logits.float().flatten(1).softmax(1).view_as(logits)

    def refuse(self, images: Tensor) -> None:
        """Refuse anything but images of at least one token."""
        check_images(images)
        if min(images.shape[-2:]) < self.patch_size:
            size = " × ".join(map(str, images.shape[-2:]))
            raise InputError(f"a picture of {size} pixels is smaller than one token ({self.patch_size}); enlarge it")

    def forward(self, images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
        """Positions (B, N, 2)."""
        check_tokens(tokens)
        if tokens < self.min_tokens:
            raise InputError(f"the policy was trained for {self.min_tokens} tokens and more, got {tokens}")
        return self.place(self.maps(images), images, tokens)

    def place(self, maps: Tensor, images: Tensor, tokens: int) -> Tensor:
        """Positions for importance maps (B, R, C) of images."""
        height, width = images.shape[-2:]
        cells = (height // self.patch_size) * (width // self.patch_size)
        strength = self.strength * max(0.0, 1 - tokens / cells)
        # In float64 on the CPU, as in `focus`, so that positions are the same on every device.
        rows, columns = (upsampling(cells) for cells in maps.shape[1:])
        density = rows @ maps.cpu().double() @ columns.mT
        density = density / density.sum((1, 2), keepdim=True)
        return equal_shares(density, strength, images, tokens)

    def save(self, path: str | Path) -> None:
        """Write the policy by itself: a safetensors file that names the weights it was trained for."""
        write_tensors(path, self.look.state_dict(), KEY, {"format": FORMAT, **self.describe()})

    def describe(self) -> dict[str, Any]:
        """A JSON description, from which `build_policy` rebuilds the policy. Version 0.2 reads it too."""
        values = {"patch_size": self.patch_size, "strength": self.strength, "fewest": self.min_tokens}
        return {**self.about, **values, "look": "thumbnail", "sizes": 0.0, "options": self.options}


def upsampling(cells: int) -> Tensor:
    """A matrix (FINER · cells, cells) that upsamples an axis by bilinear interpolation.

    Exported graphs are simpler with it than with F.interpolate.
    """
    at = ((torch.arange(cells * FINER) + 0.5) / FINER).double().sub(0.5).clamp(0, cells - 1)
    return (1 - (at[:, None] - torch.arange(cells)).abs()).clamp(min=0)


def is_policy_file(prior: Any) -> bool:
    """Whether a prior is the name of a policy's file."""
    return isinstance(prior, (str, Path)) and str(prior).endswith(".safetensors")


def read_policy_file(path: str | Path, patch_size: int = 16) -> Policy:
    """Read a policy file of `spot learn`. `about` names the weights it was trained for; see `spot.load_policy`.

    patch_size: the model's, for files of version 0.2, which do not contain it.
    """
    state, about = read_tensors(path, KEY, "a policy written by spot learn")
    if about.get("format") != FORMAT:
        raise InputError(f"{path} is a policy in format {about.get('format')!r}; this version reads {FORMAT}")
    about = {"patch_size": patch_size, **about}
    policy = build_policy(about, {f"look.{name}": tensor for name, tensor in state.items()}, str(path))
    policy.__name__ = Path(path).name
    return policy


def build_policy(
    about: Mapping[str, Any], state: Mapping[str, Tensor] | None = None, name: str = "the policy"
) -> Policy:
    """A frozen policy from its description and weights (default: random). `name` is used in error messages."""
    from spot.placement.finder import Finder  # which imports this module

    policy: Policy
    try:
        if about["look"] not in ("thumbnail", "glimpses") or about.get("sizes"):
            raise InputError("its kind of policy was removed in version 0.3; train it again with spot learn")
        options = {**about["options"], "about": {key: about[key] for key in ("model", "hash", "made")}}
        if about["look"] == "glimpses":
            policy = Finder(about["patch_size"], glimpses=about["glimpses"], margin=about["margin"], **options)
        else:
            policy = Policy(about["patch_size"], strength=about["strength"], min_tokens=about["fewest"], **options)
        policy.eval().requires_grad_(False)
        if state is not None:
            policy.load_state_dict(state)
    except InputError as error:
        raise InputError(f"{name} cannot be used: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} is a damaged policy: {str(error).splitlines()[0]}") from error
    return policy
