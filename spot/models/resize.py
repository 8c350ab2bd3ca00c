"""A smaller image: the simplest way to have fewer tokens.

The image is shrunk until the ViT's own patch grid on it has N cells, which needs no training and no
placement. Position embeddings are those of the cell centres, as for any other positions.
"""

import math
from typing import Any

from torch import Generator, Tensor
from torch.nn import functional as F

from spot.errors import InputError
from spot.models.wrappers import Wrapper
from spot.tokens.position_embedding import grid_positions

MOST_SQUEEZED = 4 / 3  # the largest change of aspect ratio of a shrunk image, in either direction


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
        return self.model.forward_features(shrunk(images, positions.shape[1], self.model.patch_size), positions)


def small_grid(tokens: int, height: int, width: int) -> tuple[int, int]:
    """(rows, columns) with exactly this many cells and the aspect closest to the image's."""

    def squeezed(rows: int, columns: int) -> float:
        return math.exp(abs(math.log(rows * width / (columns * height))))

    pairs = [(rows, tokens // rows) for rows in range(1, tokens + 1) if tokens % rows == 0]
    best = min(pairs, key=lambda pair: squeezed(*pair))
    if squeezed(*best) > MOST_SQUEEZED:
        near = sorted(
            (rows * columns for rows in range(1, tokens + 1) for columns in range(1, tokens + 1)
             if squeezed(rows, columns) <= MOST_SQUEEZED),
            key=lambda count: abs(count - tokens),
        )  # fmt: skip
        raise InputError(
            f"no smaller image of this aspect ({height} × {width}) has {tokens} patches in rows and columns; "
            f"the nearest number is {near[0]}"
        )
    return best


def shrunk(images: Tensor, tokens: int, size: int) -> Tensor:
    """Images (B, C, H, W) shrunk so that their grid of size × size patches has this many cells."""
    rows, columns = small_grid(tokens, *images.shape[-2:])
    if (rows * size, columns * size) == tuple(images.shape[-2:]):
        return images
    return F.interpolate(images, (rows * size, columns * size), mode="bicubic", antialias=True)
