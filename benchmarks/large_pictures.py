"""One picture of 224 to 4,096 pixels a side: time and memory of 49 tokens on a glimpse, and of the dense ViT.

A ViT-Ti with random weights, batch 1, one thread. "glimpse": 49 tokens at a given place. "found": the same, after a
finder that sees the picture at 680 pixels. "context": 9 of the 49 tokens tile the whole picture, which needs all of its
pyramid. "resized": the picture shrunk to 224 first. "dense": all patches, up to 1,024 pixels. Memory is what the call
allocates beyond the picture, at its peak, in MB.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import spot
from spot.placement.finder import Finder
from spot.placement.glimpses import glimpse_positions

SIDES, LARGEST = (224, 448, 1024, 2048, 4096), 1024  # of the dense ViT


def run(rounds: int = 5, sides: tuple[int, ...] = SIDES) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = spot.adapt("vit_tiny_patch16_224", tokens=49).eval()
    finder = Finder(16).eval()
    glimpse = torch.tensor([[[0.45, 0.6, 112.0]]])
    rows = []
    with torch.inference_mode():
        for side in sides:
            images = torch.rand(1, 3, side, side)
            calls: dict[str, Callable[[], Any]] = {
                "glimpse": lambda images=images: model(images, glimpse_positions(images, glimpse, 49, 16)),
                "found": lambda images=images: model(images, finder(images, 49)),
                "context": lambda images=images: model(images, glimpse_positions(images, glimpse, 49, 16, context=9)),
                "resized": lambda images=images: model(
                    F.interpolate(images, (224, 224), mode="bilinear", antialias=True), model.grid()[None]
                ),
            }
            if side <= LARGEST:
                calls["dense"] = lambda images=images: model(images, model.grid(images))
            for name, call in calls.items():
                rows.append({"side": side, "what": name, "ms": fastest(call, rounds), "MB": memory(call)})
    torch.set_num_threads(threads)
    return rows


def fastest(call: Callable[[], Any], rounds: int) -> float:
    """Milliseconds, the least of some calls."""
    call()
    spent = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begun)
    return round(1000 * min(spent), 1)


def memory(call: Callable[[], Any]) -> float:
    """The largest sum of allocations and releases during a call, in MB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = peak = 0
    for event in sorted((e for e in profiler.events() if e.name == "[memory]"), key=lambda e: e.time_range.start):
        held += event.cpu_memory_usage
        peak = max(peak, held)
    return round(peak / 1e6, 1)
