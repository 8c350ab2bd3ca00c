"""Positions moved without looking, beside which a search is judged (none of this is in the paper).

All take positions (B, N, 2), (y, x) as fractions of images of `size` = (H, W) pixels, and stay in Ω, between the
centres of the outermost pixels. Numbers are drawn on the CPU.
"""

import math

import torch
from torch import Generator, Tensor

TRIES = 8  # directions, before one that leaves the image is held at its edge


def moved_as_far(
    start: Tensor, end: Tensor, size: tuple[int, int], generator: Generator | None = None, tries: int = TRIES
) -> Tensor:
    """Each token of start moved by as many pixels as it is away from end, in a random direction."""
    distance = ((end - start)[..., :2] * start.new_tensor(size)).norm(dim=-1, keepdim=True)
    there, outside = start, torch.ones(start.shape[:-1], dtype=torch.bool, device=start.device)
    for _ in range(tries):
        angle = 2 * math.pi * torch.rand(start.shape[:-1], generator=generator).to(start.device)
        way = distance * torch.stack([angle.sin(), angle.cos()], -1)
        there = torch.where(outside[..., None], shifted(start, way, size), there)
        outside &= (inside(there, size) != there).any(-1)
    return inside(there, size)


def jittered(positions: Tensor, pixels: float, size: tuple[int, int], generator: Generator | None = None) -> Tensor:
    """Each coordinate moved by a random amount between −pixels and +pixels, all equally likely."""
    noise = torch.rand(*positions.shape[:-1], 2, generator=generator).to(positions)
    return inside(shifted(positions, (2 * noise - 1) * pixels, size), size)


def whole_pixels(positions: Tensor, size: tuple[int, int], window: int) -> Tensor:
    """Each position moved to the nearest one whose window of so many pixels needs no interpolation."""
    corner = positions[..., :2] * positions.new_tensor(size) - window / 2
    return inside(shifted(positions, corner.round() - corner, size), size)


def shifted(positions: Tensor, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Positions (…, 2 or 3) moved by pixels (…, 2); a third number, a window's scale, stays."""
    return torch.cat([positions[..., :2] + pixels / positions.new_tensor(size), positions[..., 2:]], -1)


def inside(positions: Tensor, size: tuple[int, int]) -> Tensor:
    """Positions (…, 2 or 3) held in Ω."""
    edge = 0.5 / positions.new_tensor(size)
    return torch.cat([positions[..., :2].clamp(edge, 1 - edge), positions[..., 2:]], -1)
