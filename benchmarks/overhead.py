"""Eager PyTorch, one image, ViT-Ti/16 on one thread: timm's blocks alone, and the time that SPoT adds.

"times as fast" is the dense ViT's processor time by the row's in the same round, median over rounds. The blocks are
timm's own, with its final norm and head, on tokens that are embedded already: no placement can be faster. "share" is
the row's time by the forward pass's.
"""

from functools import partial
from statistics import median

import torch
from torch import Tensor

import spot
from benchmarks import ratio
from spot.evaluation.throughput import cpu_threads, interleaved


@torch.no_grad()
def run(rounds: int = 41) -> list[dict]:
    whole = spot.adapt("vit_tiny_patch16_224").at(scale="auto").eval()
    image = torch.randn(1, 3, 224, 224)
    calls = {("dense", 196): whole.vit}
    for tokens in (25, 49, 100):
        model = whole.at(tokens=tokens)
        positions = model.place(image)
        embedded = model.embed(image, positions)[0]
        calls["forward pass", tokens] = model
        calls["blocks, norm and head", tokens] = partial(blocks, model.vit, embedded)
        calls["placement and embedding", tokens] = partial(embed, model)
        calls["positions given", tokens] = partial(model, positions=positions)
    with cpu_threads(1):
        interleaved(calls, image, 3)  # to warm up
        seconds = interleaved(calls, image, rounds, "processor")
    return [
        {
            "tokens": tokens,
            "part": part,
            "ms": 1000 * median(seconds[part, tokens]),
            "times as fast": ratio(seconds, ("dense", 196), (part, tokens)),
            "share": None if part == "dense" else ratio(seconds, (part, tokens), ("forward pass", tokens)),
        }
        for part, tokens in calls
    ]


def blocks(vit: torch.nn.Module, tokens: Tensor, image: Tensor) -> Tensor:
    return vit.forward_head(vit.norm(vit.blocks(tokens)))  # type: ignore[operator]


def embed(model: spot.SpotViT, image: Tensor) -> Tensor:
    return model.embed(image, model.place(image))[0]
