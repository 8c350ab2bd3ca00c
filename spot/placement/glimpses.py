"""Glimpses: square regions of a large picture, each with a grid of tokens and its own coordinates.

A glimpse is (y, x, side): its centre as a fraction of the picture's height and width, and its side in pixels. Its
tokens tile it, so a small glimpse is magnified. Each token uses the position embedding of its place in the glimpse, so
the ViT processes a glimpse like an image.

    glimpses = torch.tensor([[[0.45, 0.7, 56.0]]])           # (B, G, 3): one glimpse of 56 pixels
    positions = glimpse_positions(images, glimpses, tokens=49, patch_size=16)    # (B, 49, 7)
    logits = model(images, positions)                        # the ViT on those 56 pixels, enlarged to 112

Several glimpses share the tokens of one forward pass. A search moves and resizes whole glimpses:
`search(Glimpsing(model, 49), images, labels, glimpses)`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from spot.errors import InputError
from spot.placement.priors import check_images, check_tokens, isotropic_positions
from spot.tokens.windows import windows

ALIGNED = 16  # parts are cropped at multiples of this many pixels, so that their pyramid matches the picture's
MIN_SIDE = 4.0  # minimum side of a glimpse, in pixels


def glimpse_positions(images: Tensor, glimpses: Tensor, tokens: int, patch_size: int) -> Tensor:
    """Positions (B, N, 7) for N = tokens on glimpses (B, G, 3) of images (B, C, H, W). Differentiable in glimpses.

    The tokens are divided evenly among the glimpses; the first ones get one more if there is a remainder. Within a
    glimpse they are evenly spaced: 49 tokens form a 7 × 7 grid.
    """
    check_images(images)
    if glimpses.ndim != 3 or glimpses.shape[-1] != 3 or not glimpses.shape[1] or glimpses.shape[0] != images.shape[0]:
        raise InputError(f"glimpses must have shape ({images.shape[0]}, G, 3), got {tuple(glimpses.shape)}")
    check_tokens(tokens)
    count = glimpses.shape[1]
    if tokens < count:
        raise InputError(f"{tokens} tokens are too few for {count} glimpses")
    size, parts = glimpses.new_tensor(images.shape[-2:]), []
    for number, glimpse in enumerate(glimpses.unbind(1)):
        centre, side = glimpse[:, :2], glimpse[:, 2:]
        share = tokens // count + (number < tokens % count)
        places = isotropic_positions(share, 1, 1).to(glimpses)  # (1, share, 2)
        extent = side / size  # (B, 2): the glimpse as a fraction of the picture
        positions = centre[:, None] + (places - 0.5) * extent[:, None]
        scale = (side / (patch_size * share**0.5))[:, None].expand(-1, share, -1)
        region = torch.cat([centre, extent], -1)[:, None].expand(-1, share, -1)
        parts.append(torch.cat([positions, scale, region], -1))
    return torch.cat(parts, 1)


class Glimpsing(nn.Module):
    """Wraps a model to take glimpses (B, G, 3) instead of positions, so that `spot.search` moves and resizes them."""

    patch_size = 1  # so that the third column, a window's scale, is a glimpse's side in pixels

    def __init__(self, model: Any, tokens: int = 49) -> None:
        super().__init__()
        self.model: Any = model
        self.tokens = tokens

    def forward(self, images: Tensor, glimpses: Tensor) -> Tensor:
        """Images (B, C, H, W) and glimpses (B, G, 3) → logits (B, classes)."""
        return self.model(images, glimpse_positions(images, glimpses, self.tokens, self.model.patch_size))


def cut_out(picture: Tensor, y: float, x: float, side: float, samples: int) -> Tensor:
    """Crop a square from a uint8 picture (3, H, W), sampled as tokens are: (3, samples, samples), from 0 to 255.

    y, x and side are in pixels. The samples equal those of SpotViT on the whole picture, but only a part is processed.
    """
    height, width = picture.shape[1:]
    reach = side + 2 * ALIGNED
    (top, bottom), (left, right) = (
        (max(0, int((middle - reach) // ALIGNED) * ALIGNED), min(length, int(middle + reach) + 1))
        for middle, length in ((y, height), (x, width))
    )
    part = picture[:, top:bottom, left:right].float()
    place = torch.tensor([[[(y - top) / part.shape[1], (x - left) / part.shape[2], side / samples]]])
    return windows(part[None], place, samples)[0, 0]
