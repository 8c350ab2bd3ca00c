"""Baselines, the alternatives to token placement, by name. Commands and studies use this table.

    BASELINES["tome"].build(model, 25)     # has the call of a SpotViT, and its weights

To add a baseline, write a Wrapper (spot.models.wrappers) and list it here. Those that only choose windows are in this
module: random patches, a smaller image, and elastic windows. Token merging is in tome.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from spot.errors import InputError
from spot.models.family import Family, Source, at_budget
from spot.models.spot_vit import SpotViT
from spot.models.tome import Merging, ToMe
from spot.models.tome_schedule import blocks_macs, schedule_for_macs, schedule_for_tokens
from spot.models.wrappers import PlainViT, TokenModel, Wrapper
from spot.placement.priors import LEARNED
from spot.tokens.position_embedding import grid_positions

MAX_ASPECT_CHANGE = 4 / 3  # of a shrunk image, in either direction


class PatchDropout(Wrapper):
    """A SpotViT on `tokens` random patches of the grid (PatchDropout at inference; Liu et al., 2023).

    timm and the authors round the number of kept patches, so that 25 of 196 may become 24; here it is exact.
    """

    random = True

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        """The centres of the kept patches (B, N, 2), in the grid's order."""
        grid = self.model.grid(images)
        cells = grid.shape[1]
        self.check_tokens(tokens, cells)
        # Drawn on the CPU, so one seed keeps the same patches on every device.
        order = torch.rand(len(images), cells, generator=generator).argsort(1)
        kept = order[:, :tokens].sort(1).values.to(grid.device)
        return grid.gather(1, kept[..., None].expand(-1, -1, grid.shape[-1]))


class Resize(Wrapper):
    """A SpotViT on images shrunk to a grid of `tokens` patches, antialiased. It needs neither training nor placement.

    Position embeddings are those of the cell centres, as for any other positions.
    """

    def check_tokens(self, tokens: int, cells: int) -> None:
        super().check_tokens(tokens, cells)
        small_grid(tokens, *self.model.img_size)

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        """The centres of the shrunk image's patches (B, N, 2)."""
        self.check_tokens(tokens, self.model.grid(images[:1]).shape[1])
        grid = grid_positions(small_grid(tokens, *images.shape[-2:]))
        return grid.to(images.device).expand(len(images), -1, -1)

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        """Features (B, P + N, D) of images shrunk to as many patches as there are positions."""
        positions = self.place(images, **placement) if positions is None else positions
        return self.model.forward_features(shrink_to_grid(images, positions.shape[1], self.model.patch_size), positions)


def small_grid(tokens: int, height: int, width: int) -> tuple[int, int]:
    """(rows, columns) with exactly this many cells and the aspect closest to the image's."""

    def aspect_change(grid: tuple[int, int]) -> float:
        ratio = grid[0] * width / (grid[1] * height)
        return max(ratio, 1 / ratio)

    best = min(((rows, tokens // rows) for rows in range(1, tokens + 1) if tokens % rows == 0), key=aspect_change)
    if aspect_change(best) > MAX_ASPECT_CHANGE:
        sides = range(1, max(tokens, 32) + 1)
        possible = [math.prod(grid) for grid in product(sides, sides) if aspect_change(grid) <= MAX_ASPECT_CHANGE]
        raise InputError(
            f"no smaller image of this aspect ({height} × {width}) has {tokens} patches in rows and columns; "
            f"the nearest number is {min(possible, key=lambda count: abs(count - tokens))}"
        )
    return best


def shrink_to_grid(images: Tensor, tokens: int, patch_size: int) -> Tensor:
    """Images (B, C, H, W) shrunk so that their grid of patches has this many cells."""
    rows, columns = small_grid(tokens, *images.shape[-2:])
    size = rows * patch_size, columns * patch_size
    return images if size == images.shape[-2:] else F.interpolate(images, size, mode="bicubic", antialias=True)


class ElasticViT(Wrapper):
    """A SpotViT on elastic windows: random patches of its grid, shifted and rescaled (Pardyl et al., "Beyond Grids").

    Side and shift are whole numbers of pixels, and a window is read as K × K samples: the discrete counterpart of
    SPoT's subpixel placement. ElasticViT's embedding of the window's side is left out. The default ranges are ours,
    because the published ones belong to ElasticViT's own training.

    Args:
        model: as made by spot.adapt; its parameters are shared, not copied.
        tokens: number of patches to keep, by default all.
        shift: the largest shift in each direction in whole pixels, by default half a patch.
        scale: sides are drawn uniformly between these multiples of the patch's side, rounded to pixels.
    """

    random = True

    def __init__(
        self,
        model: SpotViT,
        tokens: int | None = None,
        *,
        shift: int | None = None,
        scale: tuple[float, float] = (0.5, 2.0),
    ) -> None:
        super().__init__(model, tokens)
        self.shift = model.patch_size // 2 if shift is None else shift
        self.scale = scale
        if self.shift < 0 or not 0 < scale[0] <= scale[1]:
            raise InputError(f"shift must be at least 0 and scale a rising pair above 0, got {shift} and {scale}")

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        """Random windows (B, N, 3): y, x and scale. Windows that extend beyond the image are moved inside if they fit.

        The scale is the distance between a window's samples in pixels, its side / K.
        """
        grid, size = self.model.grid(images), self.model.patch_size
        batch, cells = grid.shape[:2]
        self.check_tokens(tokens, cells)
        # Four numbers for every window, drawn on the CPU: an image's windows depend neither on the device
        # nor on the size of the batch.
        keep, side, *moves = torch.rand(batch, cells, 4, generator=generator).to(grid.device).unbind(-1)
        kept = keep.argsort(1)[:, :tokens].sort(1).values

        low, high = (max(1, round(size * factor)) for factor in self.scale)
        sides = low + (side.gather(1, kept) * (high - low + 1)).floor()
        centres = []
        for axis, (length, move) in enumerate(zip(images.shape[-2:], moves, strict=True)):
            moved = (move.gather(1, kept) * (2 * self.shift + 1)).floor() - self.shift
            start = (grid[..., axis].gather(1, kept) * length - sides / 2).round() + moved
            start = torch.minimum(start, length - sides).clamp(min=0)
            centres.append((start + sides / 2) / length)
        return torch.stack([*centres, sides / size], -1)


@dataclass(frozen=True)
class Baseline:
    """A model to compare with, built from a SpotViT's weights and a budget."""

    name: str
    make: Callable[[Any, int], TokenModel]  # from a SpotViT (or a family, with `by_budget`) and a budget
    random: bool = False  # results depend on the seed
    dense: bool = False  # always has all tokens of the grid
    by_budget: bool = False  # selects its weights from a family itself

    def build(self, source: Source, tokens: int | None = None) -> TokenModel:
        """The model for a budget, by default the whole grid; refuses budgets that it does not support."""
        if tokens is None:
            tokens = source.cells if isinstance(source, Family) else len(source.grid())
        weights = source if self.by_budget or isinstance(source, SpotViT) else at_budget(source, tokens)
        return self.make(weights, tokens)


# Chosen from seven schedules for the retrofitted ViT-Ti on 250 images set aside. At the cost of 49
# tokens a geometric schedule with this floor reaches 30.4 %, an even one 9.6. At the cost of 100 the even one is best.
TOME_FLOOR = 0.25  # of the budget, below a third of the grid


def tome_at_cost(model: SpotViT, tokens: int, floor: int | None = None) -> ToMe:
    """ToMe on the grid whose blocks need no more multiply-adds than this many tokens without merging, if possible."""
    return ToMe(model, schedule_for_macs(model, blocks_macs(model, tokens), floor))


def tome_with_floor(model: SpotViT, tokens: int) -> ToMe:
    """ToMe at the cost of this many tokens, with the schedule that was most accurate at that cost."""
    few = 3 * tokens < len(model.grid())
    return tome_at_cost(model, tokens, max(1, round(TOME_FLOOR * tokens)) if few else None)


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline("plain", PlainViT, dense=True),
        Baseline("resize", Resize),  # the whole image, made smaller, so that its grid has N patches
        Baseline("patch-dropout", PatchDropout, random=True),
        Baseline("tome", lambda model, tokens: ToMe(model, schedule_for_tokens(model, tokens))),  # N tokens are left
        Baseline("tome-cost", tome_at_cost),
        Baseline("tome-floor", tome_with_floor),
        Baseline("merged", Merging, by_budget=True),  # more windows, merged at the cost of N tokens
        Baseline("merged-learned", lambda model, tokens: Merging(model, tokens, LEARNED), by_budget=True),
        Baseline("elastic", ElasticViT, random=True),
    )
}
