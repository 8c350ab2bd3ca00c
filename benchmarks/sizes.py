"""Windows of scale 2 and 1.6 from a pyramid, beside windows of scale 1 and grid_sample on the same pyramid.

Batch 32, 224 × 224, K = 16. "ratio" is the other's time by ours in the same round, median over rounds: above 1
we are faster. The pyramid is there before, as it is where the same images are read again (a search, several
budgets); the last rows say what building it takes.
"""

import math

import torch
from torch import Tensor

import spot
from benchmarks import ratio
from benchmarks.tokens import BATCH, SIDE, SIZE, grid_sample_windows
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
        "grid_sample": lambda images: from_levels(levels, positions, scale),
    }
    seconds = timed(calls, levels.levels[0], rounds)
    against = ratio(seconds, "grid_sample", "spot")
    return row(f"windows of scale {scale:g}", positions.shape[1], "grid_sample", against)


def from_levels(levels: Pyramid, positions: Tensor, scale: float) -> Tensor:
    """The same samples through the general grid sampler, from one level where that is enough."""
    below, share = int(math.log2(scale)), math.log2(scale) % 1
    numbers = [below, below + 1] if share else [below]
    sampled = [grid_sample_windows(levels.levels[number], positions, scale) for number in numbers]
    return torch.lerp(*sampled, share**2) if share else sampled[0]


def timed(calls: dict, images: Tensor, rounds: int) -> dict[str, list[float]]:
    with torch.no_grad():
        for call in [*calls.values()] * 3:  # until the allocator knows these sizes
            call(images)
        return interleaved(calls, images, rounds, clock="processor")


def row(what: str, tokens: int, against: str, value: float) -> dict:
    return {"what": what, "tokens": tokens, "against": against, "ratio": value}
