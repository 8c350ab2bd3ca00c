"""How salient the places are that tokens stand on (paper, "Does Oracle Guidance Prefer Salient Regions?")."""

from typing import Literal

import torch
from torch import Tensor

from spot.errors import InputError
from spot.tokens.windows import windows

NEAR_ZERO = 0.01  # a first score below this has no relative gain


def score(maps: Tensor, positions: Tensor, size: int = 16) -> Tensor:
    """Mean of saliency maps (B, H, W) in the size × size window at each position (B, N, 2) → (B, N).

    Windows are the tokens' own: bilinear, the border repeated.
    """
    if maps.ndim != 3:
        raise InputError(f"saliency maps must have shape (B, H, W), got {tuple(maps.shape)}")
    return windows(maps[:, None].float(), positions, size).mean((2, 3, 4))


def relative_gain(
    maps: Tensor,
    start: Tensor,
    end: Tensor,
    size: int = 16,
    *,
    per: Literal["token", "image"] = "token",
) -> Tensor:
    """Relative saliency gain, (score(end) − score(start)) / score(start).

    Per token (the paper's formula) it is (B, N); per image (B,), of the mean scores of its tokens,
    where a token that starts on nothing still counts. Where the first score is below NEAR_ZERO
    the gain is NaN: a ratio to nothing says nothing, and one such token would decide the mean.
    Average with `nanmean`, and report how many were left out.

    Args:
        maps: saliency (B, H, W) in [0, 1].
        start, end: positions (B, N, 2), such as `trajectory[:, 0]` and `trajectory[:, -1]`.
        size: K, the window's side in pixels.
    """
    before, after = score(maps, start, size), score(maps, end, size)
    if per == "image":
        before, after = before.mean(1), after.mean(1)
    gain = (after - before) / before
    return torch.where(before < NEAR_ZERO, torch.nan, gain)
