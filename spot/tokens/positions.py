"""What can be known to be wrong with positions before a window is read at them."""

import warnings
from functools import cache

from torch import Tensor

from spot.errors import InputError, check_kind
from spot.tokens.pyramid import traced


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
