"""A learned prior: a cheap look at the image says where it matters, and tokens go there.

    policy = load_policy("vit-ti.policy.safetensors", model)    # refused for any other model
    maps = policy.maps(images)              # importance (B, R, R), each summing to 1
    positions = policy(images, 25)          # (B, 25, 2), or with sizes (B, 25, 3): a prior like any other
    model.prior = policy                    # or model.policy = policy, and prior="learned" by name

Two looks, which give the logarithm of the map (B, R, R) over the whole image, whatever its shape:

    Thumbnail       a small convolutional network on the image shrunk to 32 × 32 pixels
    FirstBlocks     few large tokens that tile the image, through the model's own first blocks, and a linear head

Positions come from the map by the rule of `focus`: isotropic's tokens, moved until each has an equal share of
importance and area. Importance counts less the more tokens there are, and not at all with as many as the grid
has cells, where even coverage is the ViT's own grid. Everything is differentiable in the weights.
`spot learn` (spot/training/learn.py) trains a policy.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from spot.errors import InputError, unknown
from spot.hashes import hash_tensors
from spot.placement.priors import check_images, check_tokens, spread
from spot.placement.sizes import auto_scale, tiling_scale
from spot.store import read_tensors, write_tensors
from spot.tokens.position_embedding import grid_positions
from spot.tokens.pyramid import traced

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


class FirstBlocks(nn.Module):
    """side × side large tokens that tile the image, through the model's first blocks, and a linear head.

    Each token says how important `cells` × `cells` parts of its window are. The blocks are the model's: they are
    neither trained nor saved here.
    """

    def __init__(self, model: Any, side: int = 4, depth: int = 1, cells: int = 4) -> None:
        super().__init__()
        if not 1 <= depth <= len(model.vit.blocks) or min(side, cells) < 1:
            raise InputError(f"the look takes 1 to {len(model.vit.blocks)} blocks, got {depth}; side {side}")
        self._model, self.side, self.depth, self.cells = (model,), side, depth, cells  # not a part of this module
        self.norm = nn.LayerNorm(model.embed_dim)
        self.head = nn.Linear(model.embed_dim, cells**2)
        self.everywhere = nn.Parameter(torch.zeros(side * cells, side * cells))
        nn.init.zeros_(self.head.weight)

    def features(self, images: Tensor) -> Tensor:
        """What the first blocks make of the tokens: (B, side², D)."""
        model = self._model[0]
        height, width = images.shape[-2:]
        scale = tiling_scale(self.side**2, height, width, model.patch_size)
        places = grid_positions((self.side, self.side)).to(images.device).expand(images.shape[0], -1, -1)
        x, rope = model.embed(images, torch.cat([places, torch.full_like(places[..., :1], scale)], -1))
        for block, _ in zip(model._blocks(rope), range(self.depth), strict=False):
            x = block(x)
        return x[:, model.num_prefix_tokens :]

    def forward(self, images: Tensor) -> Tensor:
        return self.read(self.features(images))

    def read(self, features: Tensor) -> Tensor:
        """Features (B, side², D) → the logarithm of the map (B, side · cells, side · cells)."""
        parts = self.head(self.norm(features)).unflatten(1, (self.side, self.side))
        parts = parts.unflatten(3, (self.cells, self.cells)).transpose(2, 3)
        return parts.flatten(3, 4).flatten(1, 2) + self.everywhere


LOOKS = {"thumbnail": Thumbnail, "tokens": FirstBlocks}


class Policy:
    """A prior that looks: images → importance map → positions, for any budget from `fewest` on.

    Not a module, so that a model whose prior it is does not take it for a part of itself; its weights are `look`'s.
    """

    random, looks = False, True
    __name__ = "learned"

    def __init__(
        self,
        model: Any,
        look: str = "thumbnail",
        *,
        strength: float = 0.9,
        sizes: float = 0.0,
        fewest: int = 4,
        made: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            model: the SpotViT whose tokens it places; its hash is kept with the policy.
            look: a name in LOOKS; options go to it.
            strength: the share of importance against area with very few tokens.
            sizes: 0 leaves sizes to the model; 1 makes a window as large as its share of the image.
            fewest: the smallest budget it was trained for.
            made: what to say of how it was trained.
        """
        if look not in LOOKS:
            raise unknown("look", look, LOOKS)
        if not 0 <= strength < 1:
            raise InputError(f"strength is the share of importance, from 0 to below 1, got {strength}")
        self.look: nn.Module = FirstBlocks(model, **options) if look == "tokens" else Thumbnail(**options)
        self.patch_size, self.strength, self.sizes, self.fewest = model.patch_size, strength, sizes, fewest
        self.about: dict[str, Any] = {"look": look, "options": options, "made": made or {}}
        self.about |= {"model": model.name, "hash": hash_of(model)}

    def logits(self, images: Tensor) -> Tensor:
        """The logarithm of the map (B, R, R), up to a constant."""
        check_images(images)
        if min(images.shape[-2:]) < self.patch_size:
            size = " × ".join(map(str, images.shape[-2:]))
            raise InputError(f"a picture of {size} pixels is smaller than one token ({self.patch_size}); enlarge it")
        return (self.look if traced() else self.look.to(images.device))(images)

    def maps(self, images: Tensor) -> Tensor:
        """Importance (B, R, R) over the whole image, each map summing to 1."""
        logits = self.logits(images)
        return logits.float().flatten(1).softmax(1).view_as(logits)

    def __call__(self, images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
        """Positions (B, N, 2), or with sizes (B, N, 3)."""
        check_tokens(tokens)
        if tokens < self.fewest:
            raise InputError(f"the policy was trained for {self.fewest} tokens and more, got {tokens}")
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
        """Write the policy by itself: a safetensors file with its model's hash."""
        write_tensors(path, self.look.state_dict(), KEY, self.describe())

    def describe(self) -> dict[str, Any]:
        """What is needed to build the policy again for its model: JSON values only."""
        return {"format": FORMAT, **self.about, "strength": self.strength, "sizes": self.sizes, "fewest": self.fewest}


def between(places: Tensor, cells: int) -> Tensor:
    """Bilinear interpolation along an axis of so many cells: how much each counts at places (..., M), in cells.

    (..., M, cells). Products with it instead of F.interpolate and F.grid_sample, so that exported graphs are simple.
    """
    at = (places.double() - 0.5).clamp(0, cells - 1)
    return (1 - (at[..., None] - torch.arange(cells)).abs()).clamp(min=0)


def load_policy(path: str | Path, model: Any) -> Policy:
    """A policy from its file; refuses one that was trained for another model."""
    state, about = read_tensors(path, KEY, "a policy, as spot learn writes it")
    if about.get("format") != FORMAT:
        raise InputError(f"{path} is a policy in format {about.get('format')!r}; this version reads {FORMAT}")
    if about.get("hash") != (own := hash_of(model)):
        raise InputError(
            f"{path} is a policy for {about.get('model')} ({about.get('hash')}), but this model is {model.name} "
            f"({own}); train one for it with spot learn"
        )
    try:
        settings: dict[str, Any] = {name: about[name] for name in ("strength", "sizes", "fewest", "made")}
        policy = Policy(model, about["look"], **settings, **about["options"])
        policy.look.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path} is a damaged policy: {str(error).splitlines()[0]}") from error
    policy.look.eval().requires_grad_(False)
    return policy


def hash_of(model: Any) -> str:
    """What a policy knows its model by: the ViT's weights, however it places tokens, for whichever budget they are."""
    origin = getattr(model, "_origin", None) or (model,)
    return hash_tensors(origin[0].vit.state_dict())
