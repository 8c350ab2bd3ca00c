"""A training step off the grid against plain timm at as many tokens (goal: at most 1.05 times its time)"""

from collections.abc import Callable
from functools import partial
from statistics import median

import timm
import torch
from torch.nn import functional as F

import spot
from benchmarks import ratio
from spot.evaluation.throughput import interleaved
from spot.placement.priors import uniform


def run(repeats: int = 11, batch: int = 16, model: str = "vit_tiny_patch16_224") -> list[dict]:
    """Forward, backward and AdamW in CPU time, in turns; medians of `repeats`. timm gets a smaller image."""
    rows = []
    for side in (5, 7, 10, 14):
        tokens, labels = side * side, torch.arange(batch)
        images = torch.randn(batch, 3, 224, 224)
        ours = spot.adapt(model).train()
        theirs = timm.create_model(model, img_size=16 * side).train()
        positions = uniform(images, tokens, torch.Generator().manual_seed(0))
        small = torch.randn(batch, 3, 16 * side, 16 * side)
        steps = {
            "spot": trainer(ours, partial(ours, images, positions), labels),
            "timm": trainer(theirs, partial(theirs, small), labels),
        }
        interleaved(steps, images, 1)  # to warm up
        seconds = interleaved(steps, images, repeats, "processor")
        times = {f"{name} ms": 1000 * median(each) for name, each in seconds.items()}
        rows.append({"tokens": tokens, **times, "ratio": ratio(seconds, "spot", "timm")})
    return rows


def trainer(
    model: torch.nn.Module, forward: Callable[[], torch.Tensor], labels: torch.Tensor
) -> Callable[[torch.Tensor], None]:
    """One optimiser step as a function, which `interleaved` calls with images."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(_: torch.Tensor) -> None:
        F.cross_entropy(forward(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
