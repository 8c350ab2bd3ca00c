"""Windows beside grid_sample and other scales, tokenization beside the patch embedding, and their memory.

Batch 32, 224 × 224, ViT-B/16. "ratio" is the other's time by ours in the same round, median over rounds:
above 1 we are faster. "memory" is the most that is alive at once beyond the images and the result, in
units of the window tensor.
"""

from collections.abc import Callable
from functools import partial

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import spot
from benchmarks import peak, ratio
from spot.evaluation.throughput import interleaved
from spot.placement.sizes import sized
from spot.tokens.pyramid import pyramid

BATCH, SIDE, SIZE = 32, 224, 16


def run(rounds: int = 15) -> list[dict]:
    images = torch.randn(BATCH, 3, SIDE, SIDE)
    # A C allocator learns from what is freed which sizes to keep; a model's activations teach it in practice.
    torch.ones(7 * 2**20).sum()
    rows = [row for tokens in (25, 49, 100, 196) for row in against_grid_sample(images, tokens, rounds)]
    rows += [row for tokens in (25, 49, 100, 196) for row in against_scale_1(images, tokens, rounds)]
    return [*rows, against_convolution(images, rounds)]


def grid_sample_windows(images: Tensor, positions: Tensor) -> Tensor:
    """The same samples through the general grid sampler."""
    offsets = (torch.arange(SIZE) - (SIZE - 1) / 2) * 2 / SIDE
    y, x = ((positions[..., axis] * 2 - 1)[..., None] + offsets for axis in (0, 1))
    points = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., :, None]), -1).flatten(1, 2)
    sampled = F.grid_sample(images, points, padding_mode="border", align_corners=False)
    return sampled.unflatten(2, (-1, SIZE)).transpose(1, 2)


def against_grid_sample(images: Tensor, tokens: int, rounds: int) -> list[dict]:
    positions = torch.rand(BATCH, tokens, 2)
    gradient = torch.randn(BATCH, tokens, 3, SIZE, SIZE)
    samplers = {"spot": partial(spot.windows, size=SIZE), "grid_sample": grid_sample_windows}

    def backward(sampler: Callable[..., Tensor], images: Tensor) -> None:
        sampler(images, positions.clone().requires_grad_()).backward(gradient)

    forward = {name: partial(each, positions=positions) for name, each in samplers.items()}
    both = {name: partial(backward, each) for name, each in samplers.items()}
    return [
        compared(calls, images, rounds, f"windows, {name}", tokens)
        for name, calls in (("forward", forward), ("forward + backward", both))
    ]


@torch.no_grad()
def against_scale_1(images: Tensor, tokens: int, rounds: int) -> list[dict]:
    """Windows of scale 2, and building the two levels of their pyramid, against windows of scale 1."""
    positions = torch.rand(BATCH, tokens, 2)
    large = sized(positions, 2.0)
    small = {"windows of scale 1": partial(spot.windows, positions=positions, size=SIZE)}
    calls = {
        "windows of scale 2": partial(spot.windows, positions=large, size=SIZE),
        "building two levels": lambda images: pyramid(images, 1),
    }
    return [compared({"spot": call, **small}, images, rounds, name, tokens) for name, call in calls.items()]


@torch.no_grad()
def against_convolution(images: Tensor, rounds: int) -> dict:
    """Windows and projection against timm's patch embedding, as a whole, with all 196 tokens off the grid."""
    vit = timm.create_model("vit_base_patch16_224", depth=1)
    model = spot.adapt(vit)
    positions = torch.rand(BATCH, 196, 2)
    calls = {
        "spot": lambda images: model.tokenizer(images, positions, vit.patch_embed, None),
        "patch embedding": vit.patch_embed,
    }
    return compared(calls, images, rounds, "windows and projection", 196)


def compared(calls: dict[str, Callable], images: Tensor, rounds: int, what: str, tokens: int) -> dict:
    """A row: our time and memory beside the other's."""
    other = next(name for name in calls if name != "spot")
    for call in [*calls.values()] * 3:  # until the allocator knows these sizes
        call(images)
    seconds = interleaved(calls, images, rounds)
    memory = beyond(calls["spot"], images, tokens)
    return {"what": what, "tokens": tokens, "against": other, "ratio": ratio(seconds, other, "spot"), "memory": memory}


def beyond(call: Callable[[Tensor], object], images: Tensor, tokens: int) -> float:
    """The peak memory of a call beyond one window tensor (the result), in window tensors."""
    return peak(call, images) / (BATCH * tokens * 3 * SIZE * SIZE * 4) - 1
