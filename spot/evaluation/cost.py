"""The cost of a forward pass in multiply-adds (MACs), by torch's FLOP counter.

torch counts matrix products, convolutions and attention, with two FLOPs per MAC. Element-wise operations, such as
sampling windows, are not counted, except the image pyramid for windows of a scale above 1.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spot.models.wrappers import TokenModel
from spot.placement.priors import uniform
from spot.tokens.pyramid import coarsest_level


def flops(model: TokenModel, shape: tuple[int, ...] | None = None, tokens: int | None = None) -> int:
    """Count the FLOPs of one image's forward pass by running it.

    Args:
        model: a SpotViT or a baseline. It runs in evaluation mode, and its mode is restored.
        shape: (C, H, W) of the image; by default the model's input size.
        tokens: place this many tokens at random, instead of by the model's prior.
    """
    weight = next(model.parameters())
    size = shape or image_shape(model)
    # Not a blank image: its saliency map would leave no pixel to the prior `background`.
    images = torch.linspace(-1, 1, math.prod(size), device=weight.device, dtype=weight.dtype).reshape(1, *size)
    # A separate generator leaves the global random state unchanged.
    generator, training = torch.Generator().manual_seed(0), model.training
    placed: dict[str, Any] = {}
    if tokens is not None:
        placed = {"positions": uniform(images, tokens, generator)}
    elif hasattr(model, "place"):  # timm models have no `place`
        placed = {"generator": generator}
    # Every version of the counter supports the unfused attention kernel, only newer ones the fused kernels.
    # Gradients stay enabled: without them, the counter's module tracker fails on views of parameters.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()
        try:
            model(images, **placed)
        finally:
            model.train(training)
    largest = 1.0
    if "generator" in placed:
        with torch.no_grad():
            sizes = model.place(images, generator=generator.manual_seed(0))[..., 2:3]
        largest = float(sizes.max()) if sizes.numel() else 1.0
    return counter.get_total_flops() + pyramid_flops(images.shape[1:], largest)


def macs(model: TokenModel, shape: tuple[int, ...] | None = None, tokens: int | None = None) -> int:
    """The multiply-adds of one image's forward pass: half its FLOPs. See `flops`."""
    return flops(model, shape, tokens) // 2


def pyramid_flops(shape: Sequence[int], scale: float) -> int:
    """FLOPs to downsample an image (C, H, W) to the pyramid levels for this scale: one per downsampled pixel."""
    channels, height, width = shape
    return sum(channels * (height // 2**level) * (width // 2**level) for level in range(coarsest_level(scale)))


def image_shape(model: TokenModel) -> tuple[int, ...]:
    """The model's input size (C, H, W)."""
    return model.spot_vit.pretrained_cfg["input_size"]
