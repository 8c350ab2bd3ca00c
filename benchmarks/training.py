"""A training step off the grid against plain timm at as many tokens (goal: at most 1.05 times its time)"""

import time
from collections.abc import Callable
from statistics import median

import timm
import torch
from torch.nn import functional as F

import spot
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
        steps = [
            trainer(ours, lambda images=images, positions=positions, ours=ours: ours(images, positions), labels),
            trainer(theirs, lambda small=small, theirs=theirs: theirs(small), labels),
        ]
        for step in steps:
            step()
        pairs = [[clock(step) for step in steps] for _ in range(repeats)]
        spot_ms, timm_ms = (1000 * median(times) for times in zip(*pairs, strict=True))
        ratio = median(first / second for first, second in pairs)
        rows.append({"tokens": tokens, "spot ms": spot_ms, "timm ms": timm_ms, "ratio": ratio})
    return rows


def trainer(model: torch.nn.Module, forward: Callable[[], torch.Tensor], labels: torch.Tensor) -> Callable[[], None]:
    """One optimiser step as a function."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        F.cross_entropy(forward(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clock(step: Callable[[], None]) -> float:
    """CPU seconds of a step: wall time would measure the neighbours."""
    began = time.process_time()
    step()
    return time.process_time() - began
