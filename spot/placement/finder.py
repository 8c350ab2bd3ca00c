"""A look for large pictures: a small convolutional network finds the places that matter, and tokens go there.

    finder = Finder(patch_size=16)
    found = finder.find(images, 3)          # glimpses (B, 3, 3), (y, x, side), and their scores (B, 3), best first
    positions = finder(images, 49)          # (B, 49, 7): a prior like any other, at one place or several
    logits = model(images, positions)       # or model(images, tokens=49, prior=finder)

The network sees the picture shrunk to `longest` pixels along its longer side, whatever its size, and has four outputs
for each cell of 8 × 8 of those pixels: how likely the middle of something is here (a logit), the logarithm of its size,
and how far from the cell's middle it is, (y, x) in cells. The places are the highest peaks. With a second stage, the
highest peaks are candidates: a second network sees each of them at the picture's own resolution, and their order is by
the sum of both logits. `spot learn` (spot/training/glimpses.py) trains both, from boxes or from the labels of whole
pictures.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spot.errors import InputError
from spot.placement.glimpses import SMALLEST, glimpse_positions
from spot.placement.policy import Policy
from spot.placement.priors import check_images
from spot.tokens.pyramid import halve
from spot.tokens.windows import windows

LOOK = "glimpses"  # what a file says
CELL = 8  # pixels of the shrunk picture along a side of a cell
USUAL = 20.0  # pixels of the shrunk picture: the size whose logarithm counts as 0
RANGE = (0.3, 6.0)  # times the usual size: the smallest and the largest that is found
LONG = 8  # times its short side: a longer picture is refused
REACH = 1.5  # cells: how far from its cell the middle may be
VIEW, AROUND = 32, 2.0  # of a candidate: samples along a side, and that side in sizes of what was found


class Found(NamedTuple):
    """Places in images, best first."""

    glimpses: Tensor  # (B, G, 3): (y, x) fractions, side in pixels of the picture
    scores: Tensor  # (B, G), from 0 to 1


class Mixing(nn.Module):
    """A residual block: each channel over 5 × 5 places, then each place over channels."""

    def __init__(self, channels: int, dilation: int = 1) -> None:
        super().__init__()
        around = {"padding": 2 * dilation, "dilation": dilation}
        self.places = nn.Conv2d(channels, channels, 5, groups=channels, bias=False, **around)  # type: ignore[arg-type]
        self.norm = nn.BatchNorm2d(channels)
        self.wide, self.narrow = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.silu(self.wide(self.norm(self.places(x)))))


def with_hues(pixels: Tensor) -> Tensor:
    """Pixels (B, 3, H, W), 0 in the middle of their range, and how red, blue and yellow they are: (B, 6, H, W).

    These are differences of colours relative to brightness, so that shade and sunlight matter less. Few pictures
    are not enough to learn that.
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
        x = self.body(with_hues(views))
        return self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))[:, 0]


class Places(nn.Module):
    """The network: pixels (B, 3, h, w) → (B, 4, h / 8, w / 8)."""

    def __init__(self, width: int = 16, body: int = 40, second: bool = False) -> None:
        super().__init__()
        self.second = SecondStage() if second else None  # here, so that one file has the weights of both
        self.stem = nn.Sequential(
            nn.Conv2d(6, width, 5, 4, 2, bias=False), nn.BatchNorm2d(width), nn.SiLU(),
            nn.Conv2d(width, body, 3, 2, 1, bias=False), nn.BatchNorm2d(body), nn.SiLU(),
        )  # fmt: skip
        self.body = nn.Sequential(Mixing(body), Mixing(body), Mixing(body, dilation=2))
        self.head = nn.Conv2d(body, 4, 1)
        assert self.head.bias is not None
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([-4.0, 0, 0, 0]))  # few cells are the middle of anything

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(F.silu(self.body(self.stem(with_hues(pixels)))))


class Finder(Policy):
    """A policy for large pictures: it finds places, and puts tokens on glimpses of them; see the module."""

    fit = "full"  # every pixel: it finds what a smaller picture would not show
    __name__ = "learned"

    def __init__(
        self,
        patch_size: int,
        *,
        longest: int = 680,
        width: int = 16,
        body: int = 40,
        candidates: int = 0,
        glimpses: int = 1,
        context: int = 0,
        margin: float = 1.25,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            patch_size: K of the model whose tokens it places, in pixels.
            longest: pixels of the picture's longer side as the network sees it.
            width, body: channels of the first layer and of the others.
            candidates: how many places the second stage sees; 0 for none.
            glimpses: how many places share the tokens.
            context: how many tokens see the whole picture coarsely.
            margin: the side of a glimpse, in sizes of what was found.
            about: JSON values to keep with it, as for a Policy.
        """
        nn.Module.__init__(self)  # a Policy's own look is another network
        fine = min(patch_size, longest, width, body, glimpses) >= 1 and min(context, candidates) >= 0
        if not (fine and 0 < margin < math.inf):
            raise InputError("a finder needs sizes of at least 1, a margin above 0, and context and candidates from 0")
        self.look = Places(width, body, candidates > 0)
        self.patch_size, self.min_tokens = patch_size, glimpses + context
        self.longest, self.candidates = longest, candidates
        self.glimpses, self.context, self.margin = glimpses, context, margin
        self.about = {"model": "", "hash": "", "made": {}, **(about or {}), "look": LOOK}
        self.options = {"longest": longest, "width": width, "body": body, "candidates": candidates}

    def maps(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) → (B, 4, R, C): logit, log size, (y, x) from the cell's middle in cells."""
        check_images(images)
        self.refuse(images)
        return self.look(self.shrunk(images))

    def refuse(self, images: Tensor) -> None:
        """Refuse pictures in which nothing could be found."""
        height, width = images.shape[-2:]
        size = f"{height} × {width}"
        if min(height, width) < self.patch_size:
            raise InputError(f"a picture of {size} pixels is smaller than one token ({self.patch_size}); enlarge it")
        if max(height, width) > LONG * min(height, width):
            raise InputError(f"a picture of {size} pixels is too long to find places in; cut it into parts")

    def shrunk(self, images: Tensor) -> Tensor:
        """Images with `longest` pixels along the longer side; means of whole pixels where that divides."""
        size = self.shrunk_size(images)
        if size == images.shape[-2:]:
            return images
        if (2 * size[0], 2 * size[1]) == images.shape[-2:]:
            return halve(images)  # the same means, in an eighth of the time
        if max(images.shape[-2:]) < self.longest:
            return F.interpolate(images, size, mode="bilinear", align_corners=False)
        return F.adaptive_avg_pool2d(images, size)

    def find(self, images: Tensor, count: int | None = None) -> Found:
        """The best places, as glimpses: `count` of them, by default as many as share the tokens."""
        return self.best(self.maps(images), images, count or self.glimpses)

    def best(self, maps: Tensor, images: Tensor, count: int) -> Found:
        """The best `count` of the highest peaks of maps (B, 4, R, C) of images."""
        second = self.look.second
        if second is None:
            return self.peaks(maps, images, count)
        found = self.peaks(maps, images, max(count, min(self.candidates, maps[0, 0].numel())))
        seen = self.views(images, found.glimpses)
        logits = found.scores.logit(1e-6) + second(seen.flatten(0, 1)).unflatten(0, seen.shape[:2])
        logits, order = logits.topk(count)
        return Found(found.glimpses.take_along_dim(order[..., None], 1), logits.sigmoid())

    def views(self, images: Tensor, glimpses: Tensor) -> Tensor:
        """What the second stage sees of images at glimpses (B, G, 3): (B, G, 3, 32, 32)."""
        side = (glimpses[..., 2:] * (AROUND / self.margin)).clamp(max=float(max(images.shape[-2:])))
        return windows(images, torch.cat([glimpses[..., :2], side / VIEW], -1), VIEW).float()

    def peaks(self, maps: Tensor, images: Tensor, count: int) -> Found:
        """The highest peaks of maps (B, 4, R, C) of images, without the second stage."""
        logits, rest = maps[:, 0].float(), maps[:, 1:].float().flatten(2)
        rows, columns = logits.shape[1:]
        if count > rows * columns:
            raise InputError(f"{count} places were asked for, of {rows * columns} cells; ask for fewer")
        # A peak is no lower than its eight neighbours. What is none counts least, but is there where peaks are too few.
        peak = logits == F.max_pool2d(logits[:, None], 3, 1, 1)[:, 0]
        _, cell = torch.where(peak, logits, logits - 1e3).flatten(1).topk(count)
        log_size, y, x = rest.take_along_dim(cell[:, None], 2).unbind(1)
        y = cell // columns + 0.5 + y.clamp(-REACH, REACH)
        x = cell % columns + 0.5 + x.clamp(-REACH, REACH)
        height, width = self.shrunk_size(images)
        size = log_size.exp().clamp(*RANGE) * USUAL * max(images.shape[-2:]) / self.longest
        side = (self.margin * size).clamp(SMALLEST, float(max(images.shape[-2:])))
        glimpses = torch.stack([y * CELL / height, x * CELL / width, side], -1)
        return Found(glimpses, logits.flatten(1).gather(1, cell).sigmoid())

    def shrunk_size(self, images: Tensor) -> tuple[int, int]:
        """(H, W) of what the network sees."""
        ratio = self.longest / max(images.shape[-2:])
        height, width = (max(CELL, round(length * ratio)) for length in images.shape[-2:])
        return height, width

    def place(self, maps: Tensor, images: Tensor, tokens: int) -> Tensor:
        """Positions (B, N, 7) on the best peaks of maps (B, 4, R, C) of images."""
        found = self.best(maps, images, self.glimpses)
        return glimpse_positions(images, found.glimpses, tokens, self.patch_size, self.context)

    def describe(self) -> dict[str, Any]:
        """What is needed to build it again: JSON values only."""
        own = {name: getattr(self, name) for name in ("patch_size", "glimpses", "context", "margin")}
        return {**self.about, **own, "options": self.options}


def build_finder(about: Mapping[str, Any]) -> Finder:
    """A finder as `describe` says, with fresh weights that are not trained further unless one asks for it."""
    own = {name: about[name] for name in ("patch_size", "glimpses", "context", "margin")}
    known = {name: about[name] for name in ("model", "hash", "made")}
    options = {"candidates": 0, **about["options"]}  # files of earlier versions have no second stage
    return Finder(**own, **options, about=known).eval().requires_grad_(False)
