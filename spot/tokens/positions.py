"""What the columns of positions mean, and what can be known to be wrong with them before a window is read.

    2   (y, x): the window's centre, as a fraction of the picture's height and width
    3   (y, x, scale): and how many pixels stand between its samples; 1 where there is no such column
    7   (y, x, scale, region): and the region of the picture in which the token has its position embedding, as
        (y, x, height, width): centre and size, as fractions of the picture; without it the whole picture

A region changes no window. It changes what the ViT is told of the token's place: a token in the middle of a region has
the embedding of the middle of an image, wherever in the picture the region is (spot/placement/glimpses.py).
"""

import warnings
from functools import cache

from torch import Tensor

from spot.errors import InputError, check_kind
from spot.tokens.pyramid import traced

COLUMNS = (2, 3, 7)


def in_region(positions: Tensor) -> Tensor:
    """Where tokens are in their regions, (..., 2), as fractions of it; in the picture without one."""
    if positions.shape[-1] != 7:
        return positions[..., :2]
    return (positions[..., :2] - positions[..., 3:5]) / positions[..., 5:] + 0.5


def check_positions(positions: Tensor) -> None:
    """Refuse no tokens at all, and NaN or infinity; warn, once, of positions that look like pixels.

    Values are looked at on the CPU only: reading them back from a GPU would make every forward pass wait.
    """
    check_kind("positions", positions, Tensor)
    if not positions.is_floating_point():
        raise InputError(f"positions must be fractions, in float32, got {positions.dtype}")
    if positions.ndim == 3 and positions.shape[1] == 0:
        raise InputError("positions must have at least one token, got (B, 0, 2)")
    if traced() or positions.device.type != "cpu" or not positions.numel() or positions.ndim != 3:
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
