"""Glimpses: square regions of a large picture, each read by a grid of tokens in coordinates of its own.

A glimpse is (y, x, side): its centre as a fraction of the picture's height and width, and its side in pixels.
Its tokens tile it, so the fewer there are, the larger are their windows, and a small glimpse is magnified. Each token
has the position embedding of its place in the glimpse: to the ViT a glimpse is an image.

    glimpses = torch.tensor([[[0.45, 0.7, 56.0]]])           # (B, G, 3): one glimpse of 56 pixels
    positions = glimpse_positions(images, glimpses, tokens=49, patch_size=16)    # (B, 49, 7)
    logits = model(images, positions)                        # the ViT on those 56 pixels, enlarged to 112

Several glimpses share the tokens and are read in one forward pass; `context` tokens see the whole picture coarsely.
A search moves and resizes whole glimpses: `search(Glimpsing(model, 49), images, labels, glimpses)`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from spot.errors import InputError
from spot.placement.priors import check_images, check_tokens, even_places
from spot.placement.sizes import tiling_scale
from spot.tokens.windows import windows

ALIGNED = 16  # a part is cut at multiples of so many pixels, so that its pyramid is the picture's
SMALLEST = 4.0  # pixels: a smaller glimpse shows nothing


def glimpse_positions(images: Tensor, glimpses: Tensor, tokens: int, patch_size: int, context: int = 0) -> Tensor:
    """Positions (B, N, 7) of N = tokens on glimpses (B, G, 3) of images (B, C, H, W). Differentiable in glimpses.

    The first `context` of them cover the whole picture evenly. The others are shared out among the glimpses, one more
    for the first ones where they do not divide; each glimpse's cover it evenly: 49 are a grid of 7 × 7.
    """
    check_glimpses(images, glimpses)
    check_tokens(tokens)
    count = glimpses.shape[1]
    if not 0 <= context <= tokens - count:
        raise InputError(f"{tokens} tokens are too few for {count} glimpses and {context} tokens of context")
    height, width = images.shape[-2:]
    size = glimpses.new_tensor([height, width])
    parts = [whole_picture(images, context, patch_size).to(glimpses)] if context else []
    for number, (centre, side) in enumerate(zip(*(part.unbind(1) for part in glimpses.split((2, 1), -1)), strict=True)):
        own = (tokens - context) // count + (number < (tokens - context) % count)
        places = even_places(own, 1, 1).to(glimpses)  # (1, own, 2)
        extent = side / size  # (B, 2): the glimpse as a fraction of the picture
        at = centre[:, None] + (places - 0.5) * extent[:, None]
        scale = (side / (patch_size * own**0.5))[:, None].expand(-1, own, -1)
        region = torch.cat([centre, extent], -1)[:, None].expand(-1, own, -1)
        parts.append(torch.cat([at, scale, region], -1))
    return torch.cat(parts, 1)


def whole_picture(images: Tensor, tokens: int, patch_size: int) -> Tensor:
    """Positions (B, N, 7) that cover the whole picture evenly, with windows that tile it."""
    height, width = images.shape[-2:]
    places = even_places(tokens, height, width).to(images.device, torch.float32)
    scale = tiling_scale(tokens, height, width, patch_size)
    rest = places.new_tensor([scale, 0.5, 0.5, 1, 1]).expand(1, tokens, -1)
    return torch.cat([places, rest], -1).expand(images.shape[0], -1, -1)


def around_boxes(boxes: Tensor, size: tuple[int, int], margin: float = 1.25) -> Tensor:
    """Glimpses (..., 3) on boxes (..., 4), (left, top, right, bottom) in pixels of a picture of size (H, W).

    A glimpse is a square `margin` times as wide as the box's longer side.
    """
    if (
        not bool((boxes[..., 2:] > boxes[..., :2]).all())
        or not bool((boxes >= 0).all())
        or not bool((boxes[..., 2:] <= boxes.new_tensor([size[1], size[0]])).all())
    ):
        raise InputError(f"a box is left, top, right, bottom in pixels, inside a picture of {size[0]} × {size[1]}")
    centre = (boxes[..., :2] + boxes[..., 2:]).flip(-1) / 2 / boxes.new_tensor(size)
    return torch.cat([centre, margin * (boxes[..., 2:] - boxes[..., :2]).amax(-1, keepdim=True)], -1)


def check_glimpses(images: Tensor, glimpses: Tensor) -> None:
    """Refuse what are no glimpses of these images."""
    check_images(images)
    if glimpses.ndim != 3 or glimpses.shape[-1] != 3 or not glimpses.shape[1] or glimpses.shape[0] != images.shape[0]:
        raise InputError(f"glimpses must have shape ({images.shape[0]}, G, 3), got {tuple(glimpses.shape)}")


class Glimpsing(nn.Module):
    """A model as a function of images and glimpses (B, G, 3), so that `spot.search` moves and resizes those."""

    patch_size = 1  # the third number is a glimpse's side in pixels, as a window's scale is for one sample

    def __init__(self, model: Any, tokens: int = 49, context: int = 0) -> None:
        super().__init__()
        self.model: Any = model
        self.tokens, self.context = tokens, context

    def forward(self, images: Tensor, glimpses: Tensor) -> Tensor:
        """Images (B, C, H, W) and glimpses (B, G, 3) → logits (B, classes)."""
        window = self.model.patch_size
        return self.model(images, glimpse_positions(images, glimpses, self.tokens, window, self.context))


def cut_out(picture: Tensor, y: float, x: float, side: float, samples: int) -> Tensor:
    """A square of a picture (3, H, W) of bytes, as tokens sample it: (3, samples, samples), from 0 to 255.

    Its middle and side are in pixels. What SpotViT reads of the whole picture at such a glimpse, at the cost of a part.
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
