"""Windows, projection and position embedding together: images and positions → tokens.

The tokenizer owns no weights. It uses a timm ViT's patch projection and position table, so the ViT
remains a plain timm model: at its grid positions the tokens are its patches.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spot.tokens.position_embedding import GaussianKernels
from spot.tokens.positions import in_region
from spot.tokens.pyramid import can_read
from spot.tokens.windows import check_inputs, window_reader

MAX_CACHED_TOKENS = 256  # with more tokens, a cache needs more memory and saves little time


class Tokenizer(nn.Module):
    """Tokens of a timm ViT at continuous positions."""

    def __init__(self, grid_size: tuple[int, int], sigma: float = 0.8) -> None:
        super().__init__()
        self.kernels = GaussianKernels(grid_size, sigma)

    def forward(self, images: Tensor, positions: Tensor, patch_embed: Any, table: Tensor | None) -> Tensor:
        """Images (B, C, H, W) and positions (B, N, 2, 3 or 7: see spot.tokens.positions) → tokens (B, N, D).

        A large token gets the position embedding of its centre. Averaging over the window's area was no better
        (plain ViT-Ti on 500 shrunk images: 64.2 against 64.8 % with 100 tokens, 36.4 against 37.0 with 49).

        patch_embed is timm's, applied as a linear map to the window; table (rows × columns, D) holds
        the position embedding of its grid, or is None if the ViT has none.
        """
        projection, kernels = patch_embed.proj, None
        size = projection.kernel_size[0]
        check_inputs(images, positions, size)  # before `can_cache`, which reads the values
        if self.can_cache(images, positions):
            values = positions[0].contiguous().numpy().tobytes()
            read, kernels = cached_placement(values, positions.shape[-1], tuple(images.shape[-2:]), size, self.kernels)
            pixels = read(images).flatten(2)
            kernels = kernels.expand(len(images), -1, -1)  # rounds as without the cache
        else:
            pixels = window_reader(positions, images.shape[-2:], size)(images).flatten(2)
        tokens = F.linear(pixels, projection.weight.flatten(1), projection.bias)
        tokens = patch_embed.norm(tokens)
        if table is not None:
            tokens = tokens + self.embedding(positions, table, kernels)
        return tokens

    def can_cache(self, images: Tensor, positions: Tensor) -> bool:
        """Whether all images have the same few positions, read on the CPU without gradients."""
        if torch.is_grad_enabled() or not can_read(images) or type(images) is not Tensor:
            return False
        if images.dtype == torch.float64 or positions.dtype != torch.float32 or positions.shape[1] > MAX_CACHED_TOKENS:
            return False
        return len(positions) == 1 or bool((positions == positions[:1]).all())

    def embedding(self, positions: Tensor, table: Tensor, kernels: Tensor | None = None) -> Tensor:
        """The position embedding (B, N, D). It keeps the table's dtype under autocast, which would round positions."""
        device = table.device.type
        active = device != "meta" and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if active else nullcontext():
            kernels = self.kernels(in_region(positions)) if kernels is None else kernels
            return kernels.to(table.dtype) @ table


@lru_cache(maxsize=32)
def cached_placement(
    values: bytes, columns: int, shape: tuple[int, int], size: int, kernels: GaussianKernels
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function from images to their windows at the positions in `values`, and position kernels (1, N, cells).

    Both depend on no weight of the model. For one image, computing them takes as long as reading the windows.
    """
    positions = torch.frombuffer(bytearray(values), dtype=torch.float32).view(1, -1, columns)
    with torch.autocast("cpu", enabled=False):
        return window_reader(positions, shape, size), kernels(in_region(positions))
