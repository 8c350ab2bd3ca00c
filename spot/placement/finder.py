"""A policy for large pictures: a small convolutional network detects objects, and tokens are placed on them.

    finder = Finder(patch_size=16)
    found = finder.find(images, 3)          # glimpses (B, 3, 3), (y, x, side), and their scores (B, 3), best first
    positions = finder(images, 49)          # (B, 49, 7): a prior like any other, at one place or several
    logits = model(images, positions)       # or model(images, tokens=49, prior=finder)

The network's input is the picture, downscaled to `longest` pixels along its longer side. For each cell of 8 × 8 input
pixels it predicts four values: the logit that the cell contains an object's centre, the logarithm of the object's size,
and the offset (y, x) of its centre, in cells. The highest peaks are the detected places. With a second stage they are
candidates: a second network classifies each one at full resolution, and the sum of both logits ranks them. `spot learn
--look glimpses` (spot/training/glimpses.py) trains both, from boxes or from picture labels.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spot.errors import InputError
from spot.placement.glimpses import MIN_SIDE, glimpse_positions
from spot.placement.policy import Mixing, Policy
from spot.tokens.pyramid import halve
from spot.tokens.windows import windows

CELL = 8  # side of a cell, in pixels of the downscaled picture
REFERENCE_SIZE = 20.0  # the size whose log size is 0, in pixels of the downscaled picture
SIZE_RANGE = (0.3, 6.0)  # smallest and largest size, relative to REFERENCE_SIZE
MAX_ASPECT = 8  # maximum aspect ratio of a picture
MARGIN = 1.25  # side of a glimpse, relative to the object's size
MAX_OFFSET = 1.5  # maximum distance of an object's centre from the cell's middle, in cells
VIEW_SIDE = 32  # samples per side of the second stage's view of a candidate
VIEW_MARGIN = 2.0  # side of that view, relative to the object's size


class Detections(NamedTuple):
    """Places in images, best first."""

    glimpses: Tensor  # (B, G, 3): (y, x) fractions, side in pixels of the picture
    scores: Tensor  # (B, G), from 0 to 1


def with_colour_differences(pixels: Tensor) -> Tensor:
    """Add channels for red, blue and yellow to pixels (B, 3, H, W) in [−1, 1]: (B, 6, H, W).

    They are colour differences relative to brightness, which vary less with lighting.
    """
    red, green, blue = ((pixels + 1) / 2).clamp(0, 2).unbind(1)
    total = red + green + blue + 0.15
    reddish = red - torch.maximum(green, blue)
    bluish = blue - torch.maximum(red, green)
    yellowish = torch.minimum(red, green) - blue
    return torch.cat([pixels, 4 * torch.stack([reddish, bluish, yellowish], 1) / total[:, None]], 1)


class SecondStage(nn.Module):
    """The second network: views (M, 3, 32, 32) of candidates → logits (M)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = (6, width, 2 * width, 3 * width)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * widths[-1], 1))

    def forward(self, views: Tensor) -> Tensor:
        x = self.body(with_colour_differences(views))
        return self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))[:, 0]


class FinderNetwork(nn.Module):
    """The network: pixels (B, 3, h, w) → (B, 4, h / 8, w / 8)."""

    def __init__(self, width: int = 16, body: int = 40, second: bool = False) -> None:
        super().__init__()
        self.second = SecondStage() if second else None  # here, so that one file has both networks' weights
        self.stem = nn.Sequential(
            nn.Conv2d(6, width, 5, 4, 2, bias=False), nn.BatchNorm2d(width), nn.SiLU(),
            nn.Conv2d(width, body, 3, 2, 1, bias=False), nn.BatchNorm2d(body), nn.SiLU(),
        )  # fmt: skip
        dilated = {"dilation": 2, "padding": 4}
        self.body = nn.Sequential(
            *(Mixing(body, nn.BatchNorm2d, F.silu, bias=False, **options) for options in ({}, {}, dilated))
        )
        self.head = nn.Conv2d(body, 4, 1)
        assert self.head.bias is not None
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([-4.0, 0, 0, 0]))  # few cells contain an object's centre

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(F.silu(self.body(self.stem(with_colour_differences(pixels)))))


def highest_peaks(scores: Tensor, count: int, window: int = 3) -> Tensor:
    """Cells (B, count) of the highest peaks of scores (B, R, C). A peak is the maximum of a window around it."""
    peak = scores == F.max_pool2d(scores[:, None], window, 1, window // 2)[:, 0]
    return torch.where(peak, scores, scores - 1e3).flatten(1).topk(count).indices  # other cells rank after all peaks


class Finder(Policy):
    """A policy that detects places in large pictures and puts tokens on glimpses of them; see the module docstring."""

    fit = "full"  # all pixels of a photograph

    def __init__(
        self,
        patch_size: int,
        *,
        longest: int = 680,
        width: int = 16,
        body: int = 40,
        candidates: int = 0,
        glimpses: int = 1,
        margin: float = MARGIN,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            patch_size: K of the model whose tokens it places, in pixels.
            longest: longer side of the network's input, in pixels.
            width, body: channels of the first layer and of the others.
            candidates: number of candidates for the second stage; 0 for no second stage.
            glimpses: number of places that share the tokens.
            margin: the side of a glimpse, relative to the object's size.
            about: JSON metadata, as for a Policy.
        """
        if min(patch_size, longest, width, body, glimpses) < 1 or candidates < 0 or not 0 < margin < math.inf:
            raise InputError("a finder needs sizes of at least 1, a margin above 0, and 0 or more candidates")
        options = {"longest": longest, "width": width, "body": body, "candidates": candidates}
        look = FinderNetwork(width, body, candidates > 0)
        super().__init__(patch_size, min_tokens=glimpses, about=about, look=look, **options)
        self.longest, self.candidates, self.glimpses, self.margin = longest, candidates, glimpses, margin

    def maps(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) → (B, 4, R, C): logit, log size, offset (y, x) from the cell's middle."""
        self.refuse(images)
        return self.look(self.downscaled(images))

    def refuse(self, images: Tensor) -> None:
        """Refuse pictures that are too small or too long."""
        super().refuse(images)
        height, width = images.shape[-2:]
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise InputError(f"a picture of {height} × {width} pixels is too long to find places in; cut it into parts")

    def downscaled(self, images: Tensor) -> Tensor:
        """Resize images to `longest` pixels along the longer side; downscaling averages pixels."""
        size = self.input_size(images)
        if size == images.shape[-2:]:
            return images
        if (2 * size[0], 2 * size[1]) == images.shape[-2:]:
            return halve(images)  # the same result, eight times faster
        if max(images.shape[-2:]) < self.longest:
            return F.interpolate(images, size, mode="bilinear", align_corners=False)
        return F.adaptive_avg_pool2d(images, size)

    def find(self, images: Tensor, count: int | None = None) -> Detections:
        """The `count` best places, as glimpses. Default: the number of places that share the tokens."""
        return self.detect(self.maps(images), images, count or self.glimpses)

    def detect(self, maps: Tensor, images: Tensor, count: int) -> Detections:
        """The `count` best places in images with maps (B, 4, R, C), ranked by the second stage if there is one."""
        second = self.look.second
        if second is None:
            return self.first_stage(maps, images, count)
        found = self.first_stage(maps, images, max(count, min(self.candidates, maps[0, 0].numel())))
        views = self.candidate_views(images, found.glimpses)
        logits = found.scores.logit(1e-6) + second(views.flatten(0, 1)).unflatten(0, views.shape[:2])
        logits, order = logits.topk(count)
        return Detections(found.glimpses.take_along_dim(order[..., None], 1), logits.sigmoid())

    def candidate_views(self, images: Tensor, glimpses: Tensor) -> Tensor:
        """The second stage's input for images at glimpses (B, G, 3): (B, G, 3, 32, 32)."""
        side = (glimpses[..., 2:] * (VIEW_MARGIN / self.margin)).clamp(max=float(max(images.shape[-2:])))
        return windows(images, torch.cat([glimpses[..., :2], side / VIEW_SIDE], -1), VIEW_SIDE).float()

    def first_stage(self, maps: Tensor, images: Tensor, count: int) -> Detections:
        """The `count` highest peaks of maps (B, 4, R, C) of images, without the second stage."""
        logits, rest = maps[:, 0].float(), maps[:, 1:].float().flatten(2)
        rows, columns = logits.shape[1:]
        if count > rows * columns:
            raise InputError(f"{count} places are more than the map's {rows * columns} cells; use fewer")
        cell = highest_peaks(logits, count)
        log_size, y, x = rest.take_along_dim(cell[:, None], 2).unbind(1)
        y = cell // columns + 0.5 + y.clamp(-MAX_OFFSET, MAX_OFFSET)
        x = cell % columns + 0.5 + x.clamp(-MAX_OFFSET, MAX_OFFSET)
        height, width = self.input_size(images)
        size = log_size.exp().clamp(*SIZE_RANGE) * REFERENCE_SIZE * max(images.shape[-2:]) / self.longest
        side = (self.margin * size).clamp(MIN_SIDE, float(max(images.shape[-2:])))
        glimpses = torch.stack([y * CELL / height, x * CELL / width, side], -1)
        return Detections(glimpses, logits.flatten(1).gather(1, cell).sigmoid())

    def input_size(self, images: Tensor) -> tuple[int, int]:
        """(H, W) of the network's input."""
        ratio = self.longest / max(images.shape[-2:])
        height, width = (max(CELL, round(length * ratio)) for length in images.shape[-2:])
        return height, width

    def place(self, maps: Tensor, images: Tensor, tokens: int) -> Tensor:
        """Positions (B, N, 7) on the best peaks of maps (B, 4, R, C) of images."""
        found = self.detect(maps, images, self.glimpses)
        return glimpse_positions(images, found.glimpses, tokens, self.patch_size)

    def describe(self) -> dict[str, Any]:
        values = {"patch_size": self.patch_size, "glimpses": self.glimpses, "margin": self.margin}
        return {**self.about, **values, "look": "glimpses", "options": self.options}
