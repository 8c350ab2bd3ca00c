"""Windows beside grid_sample, tokenization beside the convolutional patch embedding, and their memory.

Batch 32, 224 × 224, ViT-B/16. "ratio" is the other's time by ours in the same round, median over rounds:
above 1 we are faster. "memory" is the most that is alive at once beyond the images and the result, in
units of the window tensor.
"""

from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import spot
from benchmarks import peak, ratio
from spot.evaluation.throughput import interleaved

BATCH, SIDE, SIZE = 32, 224, 16


def run(rounds: int = 15) -> list[dict]:
    images = torch.randn(BATCH, 3, SIDE, SIDE)
    # A C allocator learns from what is freed which sizes to keep; a model's activations teach it in practice.
    torch.ones(7 * 2**20).sum()
    rows = [row for tokens in (25, 49, 100, 196) for row in against_grid_sample(images, tokens, rounds)]
    return [*rows, against_convolution(images, rounds)]


def grid_sample_windows(images: Tensor, positions: Tensor, scale: float = 1.0) -> Tensor:
    """The same samples through the general grid sampler."""
    offsets = (torch.arange(SIZE) - (SIZE - 1) / 2) * 2 * scale / SIDE
    y, x = ((positions[..., axis] * 2 - 1)[..., None] + offsets for axis in (0, 1))
    points = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., :, None]), -1).flatten(1, 2)
    sampled = F.grid_sample(images, points, padding_mode="border", align_corners=False)
    return sampled.unflatten(2, (-1, SIZE)).transpose(1, 2)


def against_grid_sample(images: Tensor, tokens: int, rounds: int) -> list[dict]:
    positions = torch.rand(BATCH, tokens, 2)
    ways = {"spot": lambda i, p: spot.windows(i, p, SIZE), "grid_sample": grid_sample_windows}
    gradient = torch.randn(BATCH, tokens, 3, SIZE, SIZE)

    def backward(way):
        def call(images):
            leaf = positions.clone().requires_grad_()
            way(images, leaf).backward(gradient)

        return call

    rows = []
    for job in ("forward", "forward + backward"):
        calls = {
            name: (lambda images, way=way: way(images, positions)) if job == "forward" else backward(way)
            for name, way in ways.items()
        }
        for call in [*calls.values()] * 3:  # until the allocator knows these sizes
            call(images)
        seconds = interleaved(calls, images, rounds)
        rows.append(
            {
                "what": f"windows, {job}",
                "tokens": tokens,
                "against": "grid_sample",
                "ratio": ratio(seconds, "grid_sample", "spot"),
                "memory": beyond(calls["spot"], images, tokens),
            }
        )
    return rows


@torch.no_grad()
def against_convolution(images: Tensor, rounds: int) -> dict:
    """Windows and projection against timm's patch embedding, as a whole, with all 196 tokens off the grid."""
    vit = timm.create_model("vit_base_patch16_224", depth=1)
    model = spot.adapt(vit)
    positions = torch.rand(BATCH, 196, 2)
    calls = {
        "spot": lambda images: model.tokenizer(images, positions, vit.patch_embed, None),
        "convolution": lambda images: vit.patch_embed(images),
    }
    for call in [*calls.values()] * 3:
        call(images)
    seconds = interleaved(calls, images, rounds)
    return {
        "what": "windows and projection",
        "tokens": 196,
        "against": "patch embedding",
        "ratio": ratio(seconds, "convolution", "spot"),
        "memory": beyond(calls["spot"], images, 196),
    }


def beyond(call: Callable[[Tensor], object], images: Tensor, tokens: int) -> float:
    """The peak memory of a call beyond one window tensor (the result), in window tensors."""
    return peak(call, images) / (BATCH * tokens * 3 * SIZE * SIZE * 4) - 1
