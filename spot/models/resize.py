"""A smaller image: the simplest way to have fewer tokens.

The image is shrunk until the ViT's own patch grid on it has N cells, which needs no training and no
placement. Position embeddings are those of the cell centres, as for any other positions.
"""

import math
from itertools import product
from typing import Any

from torch import Generator, Tensor
from torch.nn import functional as F

from spot.errors import InputError
from spot.models.wrappers import Wrapper
from spot.tokens.position_embedding import grid_positions

MAX_ASPECT_CHANGE = 4 / 3  # of a shrunk image, in either direction


class Resize(Wrapper):
    """A SpotViT on images shrunk to a grid of `tokens` patches, antialiased."""

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
