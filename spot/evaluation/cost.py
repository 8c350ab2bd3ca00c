"""What a prediction costs: multiply-adds (MACs) by torch's own counter.

torch counts matrix products, convolutions and attention, two FLOPs to a MAC. Element-wise work, such as sampling
windows, is not counted, except the pyramid that windows of a scale above 1 are read from.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spot.models.wrappers import TokenModel
from spot.placement.priors import uniform


def flops(model: TokenModel, shape: tuple[int, ...] | None = None, tokens: int | None = None) -> int:
    """FLOPs of one image's prediction, counted while it runs.

    Args:
        model: a SpotViT or a baseline; it runs in evaluation mode and is left as it was.
        shape: (C, H, W) of the image, by default what the model was built for.
        tokens: place this many tokens at random instead of as the model would.
    """
    weight = next(model.parameters())
    size = shape or image_shape(model)
    # Not a blank image: its saliency map would leave the prior `background` no pixel.
    images = torch.linspace(-1, 1, math.prod(size), device=weight.device, dtype=weight.dtype).reshape(1, *size)
    # Where tokens are does not change the cost; drawn from a generator of its own, not from the caller's.
    given = () if tokens is None else (uniform(images, tokens, torch.Generator().manual_seed(0)),)
    training = model.training
    # The plain kernel shows its products to every version of the counter, fused ones only to newer.
    # Gradients stay on: the counter's module tracker fails on views of parameters without them.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()
        try:
            model(images, *given)
        finally:
            model.train(training)
    largest = 1.0
    if tokens is None and hasattr(model, "place"):  # a timm model has no placement
        with torch.no_grad():
            sizes = model.place(images, generator=torch.Generator().manual_seed(0))[..., 2:3]
        largest = float(sizes.max()) if sizes.numel() else 1.0
    return counter.get_total_flops() + pyramid_flops(images.shape[1:], largest)


def macs(model: TokenModel, shape: tuple[int, ...] | None = None, tokens: int | None = None) -> int:
    """Multiply-adds of one image's prediction: half its FLOPs. See `flops`."""
    return flops(model, shape, tokens) // 2


def pyramid_flops(shape: Sequence[int], scale: float) -> int:
    """FLOPs to shrink an image (C, H, W) to the levels that windows of this scale need: one for each pixel shrunk."""
    channels, height, width = shape
    halvings = max(0, math.ceil(math.log2(max(scale, 1.0)) - 1e-6))
    return sum(channels * (height // 2**level) * (width // 2**level) for level in range(halvings))


def image_shape(model: TokenModel) -> tuple[int, ...]:
    """(C, H, W) of the images a model was built for."""
    return model.spot_vit.pretrained_cfg["input_size"]
