"""One picture of 224 to 4,096 pixels a side: time and memory of 49 tokens on a glimpse, and of the dense ViT.

A ViT-Ti with random weights, batch 1, one thread. "glimpse": 49 tokens at a given place. "found": the same, after a
finder that sees the picture at 680 pixels. "tiles": the 49 tokens tile the whole picture, which needs all of its
pyramid. "resized": the picture shrunk to 224 first. "dense": all patches, up to 1,024 pixels. Memory is what the call
allocates beyond the picture, at its peak, in MB. `python -m benchmarks.large_pictures FILE` writes the table to a page.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import spot
from spot import report
from spot.placement.finder import Finder
from spot.placement.glimpses import glimpse_positions, whole_picture

SIDES, LARGEST = (224, 448, 1024, 2048, 4096), 1024  # of the dense ViT


def run(rounds: int = 9, sides: tuple[int, ...] = SIDES) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = spot.adapt("vit_tiny_patch16_224", tokens=49).eval()
    finder = Finder(16, candidates=40).eval()
    glimpse = torch.tensor([[[0.45, 0.6, 112.0]]])
    rows = []
    with torch.inference_mode():
        for side in sides:
            images = torch.rand(1, 3, side, side)
            calls: dict[str, Callable[[], Any]] = {
                "glimpse": lambda images=images: model(images, glimpse_positions(images, glimpse, 49, 16)),
                "found": lambda images=images: model(images, finder(images, 49)),
                "tiles": lambda images=images: model(images, whole_picture(images, 49, 16)),
                "resized": lambda images=images: model(
                    F.interpolate(images, (224, 224), mode="bilinear", antialias=True), model.grid()[None]
                ),
            }
            if side <= LARGEST:
                calls["dense"] = lambda images=images: model(images, model.grid(images))
            spent = in_turns(calls, rounds)
            rows += [{"side": side, "what": name, "ms": spent[name], "MB": memory(calls[name])} for name in calls]
    torch.set_num_threads(threads)
    return rows


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of processor time of each call, the median of rounds in which they take turns."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begun = time.process_time()
            call()
            if turn:  # the first one is to warm up
                spent[name].append(time.process_time() - begun)
    return {name: round(1000 * median(times), 1) for name, times in spent.items()}


def memory(call: Callable[[], Any]) -> float:
    """The largest sum of allocations and releases during a call, in MB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    recorder = profiler.profiler
    assert recorder is not None and recorder.kineto_results is not None
    held = peak = 0
    for event in sorted(recorder.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return round(peak / 1e6, 1)


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each side, with "ms, MB" of each way."""
    lines: dict[int, dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(row["side"], {"pixels along a side": f"{row['side']:,}"})
        line[row["what"]] = f"{row['ms']:.0f} ms, {row['MB']:.0f} MB"
    names = {name: "" for line in lines.values() for name in line}
    table = report.markdown([{**names, **line} for line in lines.values()])
    return f"# Time and memory against image size\n\n{table}\n{__doc__}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(run()))
