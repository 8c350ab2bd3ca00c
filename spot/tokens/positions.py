"""The columns of a positions tensor, and checks of its values.

    2   (y, x): the window's centre, as a fraction of the picture's height and width
    3   (y, x, scale): also the distance between its samples in pixels, by default 1
    7   (y, x, scale, region): also the region relative to which the token's position embedding is computed, as
        (y, x, height, width): centre and size, as fractions of the picture; by default the whole picture

A region changes only the position embedding, not the window. A token in the middle of a region gets the embedding of
the middle of an image, wherever in the picture the region is (spot/placement/glimpses.py).
"""

import warnings
from functools import cache

from torch import Tensor

from spot.errors import InputError, check_kind
from spot.tokens.pyramid import can_read

COLUMNS = (2, 3, 7)


def in_region(positions: Tensor) -> Tensor:
    """Positions (..., 2) relative to each token's region, as fractions of it; without a region, of the picture."""
    if positions.shape[-1] != 7:
        return positions[..., :2]
    return (positions[..., :2] - positions[..., 3:5]) / positions[..., 5:] + 0.5


def check_positions(positions: Tensor) -> None:
    """Refuse empty positions, NaN and infinity; warn once about positions that look like pixels.

    Values are checked on the CPU only: reading them back from a GPU would stall every forward pass.
    """
    check_kind("positions", positions, Tensor)
    if not positions.is_floating_point():
        raise InputError(f"positions must be fractions, in float32, got {positions.dtype}")
    if positions.ndim == 3 and positions.shape[1] == 0:
        raise InputError("positions must have at least one token, got (B, 0, 2)")
    if positions.ndim != 3 or not can_read(positions):
        return
    if not bool(positions.isfinite().all()):
        raise InputError("positions must be finite, got NaN or infinity; fractions of height and width are needed")
    if positions.shape[-1] == 7 and not bool((positions[..., 5:] > 0).all()):
        raise InputError("a region must have a height and a width above 0, as fractions of the picture")
    places = positions[..., :2]
    if ((places < 0) | (places > 1)).float().mean() > 0.5:
        _warn_of_pixels()


@cache
def _warn_of_pixels() -> None:
    warnings.warn(
        "most positions lie outside the image; they are (y, x) as a fraction of height and width, "
        "so pixels are to be divided by (H, W)",
        stacklevel=2,
    )
