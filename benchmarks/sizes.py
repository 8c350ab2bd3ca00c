"""Windows of scale 2 and 1.6 from a pyramid, beside windows of scale 1 and grid_sample on the same pyramid.

Batch 32, 224 × 224, K = 16. "ratio" is the other's time by ours in the same round, median over rounds: above 1
we are faster. The pyramid is there before, as it is where the same images are read again (a search, several
budgets); the last rows say what building it takes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import spot
from benchmarks.tokens import BATCH, SIDE, SIZE, ratio
from spot.evaluation.throughput import interleaved
from spot.placement.sizes import sized
from spot.tokens.pyramid import Pyramid, pyramid


def run(rounds: int = 15) -> list[dict]:
    images = torch.randn(BATCH, 3, SIDE, SIDE)
    torch.ones(7 * 2**20).sum()  # see benchmarks/tokens.py
    levels = pyramid(images, SIZE)
    rows = []
    for tokens in (25, 49, 100, 196):
        positions = torch.rand(BATCH, tokens, 2)
        for scale in (2.0, 1.6):
            rows.append(against_grid_sample(levels, positions, scale, rounds))
        large = sized(positions, 2.0)
        calls = {
            "scale 1": lambda images, positions=positions: spot.windows(images, positions, SIZE),
            "scale 2": lambda images, positions=large: spot.windows(levels, positions, SIZE),
            "pyramid": lambda images: pyramid(images, SIZE, 2.0),
        }
        seconds = timed(calls, images, rounds)
        rows.append(row("windows of scale 2", tokens, "windows of scale 1", ratio(seconds, "scale 1", "scale 2")))
        rows.append(row("building two levels", tokens, "windows of scale 1", ratio(seconds, "scale 1", "pyramid")))
    return rows


def against_grid_sample(levels: Pyramid, positions: Tensor, scale: float, rounds: int) -> dict:
    placed = sized(positions, scale)
    calls = {
        "spot": lambda images: spot.windows(levels, placed, SIZE),
        "grid_sample": lambda images: grid_sample_windows(levels, positions, scale),
    }
    seconds = timed(calls, levels.levels[0], rounds)
    against = ratio(seconds, "grid_sample", "spot")
    return row(f"windows of scale {scale:g}", positions.shape[1], "grid_sample", against)


def grid_sample_windows(levels: Pyramid, positions: Tensor, scale: float) -> Tensor:
    """The same samples through the general grid sampler, from one level where that is enough."""
    offsets = (torch.arange(SIZE) - (SIZE - 1) / 2) * 2 * scale / SIDE
    y, x = ((positions[..., axis] * 2 - 1)[..., None] + offsets for axis in (0, 1))
    points = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., :, None]), -1).flatten(1, 2)
    below, share = int(math.log2(scale)), math.log2(scale) % 1
    sampled = [
        F.grid_sample(levels.levels[number], points, padding_mode="border", align_corners=False)
        for number in ([below, below + 1] if share else [below])
    ]
    mixed = sampled[0] if not share else torch.lerp(sampled[0], sampled[1], share**2)
    return mixed.unflatten(2, (-1, SIZE)).transpose(1, 2)


def timed(calls: dict, images: Tensor, rounds: int) -> dict[str, list[float]]:
    with torch.no_grad():
        for call in [*calls.values()] * 3:  # until the allocator knows these sizes
            call(images)
        return interleaved(calls, images, rounds, clock="processor")


def row(what: str, tokens: int, against: str, value: float) -> dict:
    return {"what": what, "tokens": tokens, "against": against, "ratio": value}
