"""Window sizes: the third column of positions (B, N, 3) is each window's scale.

A window of scale s covers s·K × s·K pixels with K × K samples. With two columns the scale is 1, one sample per pixel.
The scale "auto" uses larger windows for fewer tokens.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from spot.errors import InputError

Scale = float | Literal["auto"]
SCALE_STEP = 16.0  # a search step that moves a window by 1 % of the image changes its size by 16 %


def tiling_scale(tokens: int, height: int, width: int, size: int) -> float:
    """The scale at which all windows of K = size samples together have the area of the image, at least 1."""
    return max(1.0, math.sqrt(height * width / tokens) / size)


def auto_scale(tokens: int, height: int, width: int, size: int) -> float:
    """The scale "auto": 1 with the grid's number of tokens, and larger for fewer tokens.

    Its logarithm is 0.85, 0.7 and 0.55 of the tiling scale's with 100, 49 and 25 of 196 tokens, and at least half.
    """
    tiling = tiling_scale(tokens, height, width, size)
    return tiling ** max(0.5, 1 - 0.3 * math.log2(tiling))


def resolve_scale(scale: Scale | None, tokens: int, images: Tensor, size: int) -> float:
    """Resolve a scale, which may be "auto" or None, to a number."""
    height, width = images.shape[-2:]
    return auto_scale(tokens, height, width, size) if scale == "auto" else 1.0 if scale is None else float(scale)


def check_scale(scale: Scale | None) -> None:
    """Refuse a scale other than "auto" or a number above 0."""
    if scale is None or (isinstance(scale, str) and scale == "auto"):
        return
    if isinstance(scale, (str, bool)) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise InputError(f'scale must be "auto" or a number above 0, got {scale!r}; 1 is one sample per pixel')


def sized(positions: Tensor, scale: float) -> Tensor:
    """Append one scale to all positions (B, N, 2) as their third column. A scale of 1 changes nothing."""
    if scale == 1:
        return positions
    return torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), scale)], -1)


def to_variables(positions: Tensor) -> Tensor:
    """Convert positions to the variables of a search: scales become logarithms, divided by SCALE_STEP."""
    return torch.cat([positions[..., :2], positions[..., 2:3].log() / SCALE_STEP, positions[..., 3:]], -1)


def from_variables(variables: Tensor) -> Tensor:
    """The inverse of `to_variables`. Regions have no gradient."""
    return torch.cat([variables[..., :2], (variables[..., 2:3] * SCALE_STEP).exp(), variables[..., 3:].detach()], -1)


def variable_limits(low: Tensor, high: Tensor, positions: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Bounds of the variables of a search. Scales are at least 0.5, or half of the initial scale if that is smaller."""
    columns = positions.shape[-1]
    if columns == 2:
        return low, high
    start = float(positions[..., 2].min())
    smallest = 0.5 if start >= 0.5 else start / 2
    least, most = (low.new_tensor([math.log(limit) / SCALE_STEP]) for limit in (smallest, max(largest, 1.0)))
    free = low.new_full((columns - 3,), math.inf)  # regions are not optimised
    return torch.cat([low, least, -free]), torch.cat([high, most, free])
