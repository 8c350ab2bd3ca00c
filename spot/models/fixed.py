"""Placements that are the same for every image of one size, computed once.

With an isotropic or centered prior, positions, windows' coordinates and position kernels depend on nothing but the
size of the images. They are cached with no parameter in them, and used only for real values on the CPU: a traced
graph, or operators that are counted, must be those of the whole forward pass.
"""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from spot.placement.priors import PRIORS, AnyPrior, Prior, check_tokens, resolve_prior
from spot.placement.sizes import Scale, check_size, resolve_scale, sized
from spot.tokens.position_embedding import GaussianKernels
from spot.tokens.pyramid import is_traced
from spot.tokens.tokenizer import Fixed, Tokenizer
from spot.tokens.windows import fixed_windows

if TYPE_CHECKING:
    from spot.models.spot_vit import SpotViT

MOST_FIXED = 1024  # the largest placement that is cached, in tokens


def fixed_placement(
    model: "SpotViT",
    images: Tensor,
    tokens: int | None = None,
    prior: AnyPrior | None = None,
    scale: Scale | None = None,
    **drawing: Any,
) -> Fixed | None:
    """The cached placement that `model.place` gives with these arguments, or None if there can be none."""
    chosen = resolve_prior(model.prior if prior is None else prior)
    count = model.tokens if tokens is None else tokens
    check_tokens(count)
    check_size(scale)
    if (
        drawing
        or PRIORS.get(chosen.name) is not chosen
        or chosen.random
        or chosen.uses_image
        or count > MOST_FIXED
        or type(model.tokenizer) is not Tokenizer
        or type(images) is not Tensor
        or images.device.type != "cpu"
        or images.dtype == torch.float64
        or images.requires_grad
        or is_traced()
        or is_in_torch_dispatch_mode()
    ):
        return None
    kernels, shape = model.tokenizer.kernels, tuple(images.shape[-2:])
    size = resolve_scale(model.scale if scale is None else scale, count, images, model.patch_size)
    return _computed(chosen, count, shape, size, model.patch_size, kernels.grid_size, kernels.sigma)


@lru_cache(maxsize=64)
def _computed(
    prior: Prior,
    tokens: int,
    shape: tuple[int, int],
    scale: float,
    patch_size: int,
    grid_size: tuple[int, int],
    sigma: float,
) -> Fixed:
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        positions = sized(prior(torch.empty(1, 1, *shape), tokens, cells=math.prod(grid_size)), scale)
        kernels = GaussianKernels(grid_size, sigma)(positions[..., :2])
        return Fixed(positions, fixed_windows(positions[0], shape, patch_size), kernels)
