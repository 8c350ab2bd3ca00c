"""Time and memory of a forward pass with 49 tokens, and of the dense ViT, by image size.

The model is a ViT-Ti with random weights, at batch size 1 on one thread. "glimpse": 49 tokens at a
given place. "found": the same, after a finder that processes the image at 680 pixels. "tiles": the
49 tokens cover the whole image, which needs its whole pyramid. "resized": the image is shrunk to
224 pixels first. "dense": all patches, up to 1,024 pixels. Memory is the peak of what the call
allocates in addition to the image, in MB. `python -m benchmarks.large_pictures FILE` writes this
page.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import spot
from benchmarks import peak
from spot import report
from spot.evaluation.throughput import cpu_threads, interleaved
from spot.placement.finder import Finder
from spot.placement.glimpses import glimpse_positions
from spot.placement.sizes import tiling_scale

SIDES, LARGEST = (224, 448, 1024, 2048, 4096), 1024  # of the dense ViT


def run(rounds: int = 9, sides: tuple[int, ...] = SIDES) -> list[dict[str, Any]]:
    model = spot.adapt("vit_tiny_patch16_224", tokens=49).eval()
    finder = Finder(16, candidates=40).eval()
    glimpse = torch.tensor([[[0.45, 0.6, 112.0]]])
    rows = []
    with torch.inference_mode(), cpu_threads(1):
        for side in sides:
            images, scale = torch.rand(1, 3, side, side), tiling_scale(49, side, side, 16)
            calls: dict[str, Callable[[Any], Any]] = {
                "glimpse": lambda images: model(images, glimpse_positions(images, glimpse, 49, 16)),
                "found": lambda images: model(images, finder(images, 49)),
                "tiles": partial(model, scale=scale),
                "resized": lambda images: model(
                    F.interpolate(images, (224, 224), mode="bilinear", antialias=True), model.grid()[None]
                ),
            }
            if side <= LARGEST:
                calls["dense"] = lambda images: model(images, model.grid(images))
            interleaved(calls, images, 1)  # to warm up
            for name, spent in interleaved(calls, images, rounds, "processor").items():
                memory = round(peak(calls[name], images) / 1e6, 1)
                rows.append({"side": side, "what": name, "ms": round(1000 * median(spent), 1), "MB": memory})
    return rows


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
