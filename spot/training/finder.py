"""Train a finder (spot/placement/finder.py) on large pictures.

The places of a picture are (n, 4): y, x and size in pixels, and the probability of an object as a weight. They come
from boxes, or from `spot.training.discovery`, which needs only picture labels.

The network is trained like CenterNet (Zhou et al., "Objects as Points", 2019), on crops of downscaled pictures, most
of them around places. The targets are a heatmap with a Gaussian at the centre of each object, and the object's size
and centre. After a third of the steps, crops around false positives are added. The second stage is then trained on
detections of the first stage and on views around the places.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import Tensor

from spot import report
from spot.data.large_pictures import LargePictures
from spot.placement.finder import CELL, REFERENCE_SIZE, VIEW_MARGIN, VIEW_SIDE, Finder
from spot.placement.glimpses import MIN_SIDE, cut_out
from spot.placement.policy import build_policy
from spot.training.optim import training_steps

CROP = (128, 192)  # height and width, in pixels of the downscaled picture
BATCH, SECOND_BATCH = 16, 128  # crops per step, and views per step of the second stage
Places = Mapping[str, Tensor]
NO_PLACES = torch.zeros(0, 4)


def network_input(finder: Finder, picture: Tensor) -> Tensor:
    """A uint8 picture (3, H, W) at the resolution of the finder's network, uint8."""
    return as_bytes(finder.downscaled(picture.float()[None])[0])


def as_bytes(pixels: Tensor) -> Tensor:
    return pixels.round().clamp(0, 255).byte()


@torch.no_grad()
def detect(finder: Finder, pictures: LargePictures, count: int) -> dict[str, Tensor]:
    """The `count` best places of each picture by key, (count, 4): y, x and size in pixels, and the score."""
    places, network = {}, finder.look.eval()
    for key, picture in report.track(pictures.items(), "detecting", len(pictures)):
        maps = network(network_input(finder, picture).float()[None] / 127.5 - 1)
        found = finder.detect(maps, picture.float()[None] / 127.5 - 1, count)
        size = found.glimpses[0, :, 2:] / finder.margin
        middle = found.glimpses[0, :, :2] * found.glimpses.new_tensor(picture.shape[1:])
        places[key] = torch.cat([middle, size, found.scores[0, :, None]], 1)
    return places


def distances(found: Tensor, places: Tensor) -> Tensor:
    """The distances (m, n) of m places from n others, in pixels: the larger of those in y and in x."""
    return (found[:, None, :2] - places[None, :, :2]).abs().amax(-1)


def false_positives(found: Places, places: Places) -> dict[str, Tensor]:
    """Those of the detections that are not near a known place of their picture."""
    wrong = {}
    for key, detected in found.items():
        known = places.get(key, NO_PLACES)
        wrong[key] = detected[(distances(detected, known) > known[:, 2]).all(1)]
    return wrong


def glimpse_of(picture: Tensor, y: float, x: float, side: float, samples: int) -> Tensor:
    """A square of a uint8 picture, in pixels and within it, from 0 to 255: (3, samples, samples)."""
    height, width = picture.shape[1:]
    side = min(max(MIN_SIDE, side), height, width)
    return cut_out(picture, min(max(y, 0.0), height), min(max(x, 0.0), width), side, samples)


def make_crops(
    pictures: LargePictures, small: list[Tensor], around: Places, places: Places, each: int, draw: np.random.Generator
) -> list[Tensor]:
    """Cut `each` randomly zoomed crops per picture, three quarters of them around one of its places in `around`.

    small: the pictures at the finder's input resolution. Returns the crops, uint8 (M, 3, h, w), and their
    `target_maps`: heatmaps (M, R, C), values (M, 3, R, C) and weights (M, R, C).
    """
    crops = []
    for reduced, (key, picture) in zip(small, pictures.items(), strict=True):
        ratio, (height, width) = reduced.shape[2] / picture.shape[2], reduced.shape[1:]
        near, known = around.get(key, NO_PLACES), places.get(key, NO_PLACES)
        for _ in range(each):
            zoom = math.exp(draw.uniform(-0.4, 0.4))
            rows, columns = (
                min(round(length / zoom), most) for length, most in zip(CROP, (height, width), strict=True)
            )
            if len(near) and draw.random() < 0.75:
                y, x = (near[draw.integers(len(near)), :2] * ratio).tolist()
                top, left = y - draw.uniform(0.08, 0.92) * rows, x - draw.uniform(0.08, 0.92) * columns
            else:
                top, left = draw.uniform(0, height - rows + 1e-6), draw.uniform(0, width - columns + 1e-6)
            top, left = int(min(max(0, top), height - rows)), int(min(max(0, left), width - columns))
            crop = reduced[:, top : top + rows, left : left + columns].float()[None]
            crop = F.interpolate(crop, CROP, mode="bilinear", align_corners=False)[0].round().byte()
            scale = known.new_tensor([CROP[0] / rows, CROP[1] / columns])
            inside = known.clone()
            inside[:, :2] = (known[:, :2] * ratio - known.new_tensor([top, left])) * scale / CELL
            inside[:, 2] = known[:, 2] * ratio * float(scale.prod().sqrt())
            crops.append((crop, *target_maps(inside)))
    return [torch.stack(column) for column in zip(*crops, strict=True)]


def target_maps(places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The targets of a crop with places (n, 4): heatmap (R, C), values (3, R, C) and their weights (R, C).

    places: y and x in cells, size in pixels of the crop, weight.
    """
    rows, columns = CROP[0] // CELL, CROP[1] // CELL
    heatmap, values, weights = torch.zeros(rows, columns), torch.zeros(3, rows, columns), torch.zeros(rows, columns)
    cell_y, cell_x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
    for y, x, size, weight in places.tolist():
        if not (-0.5 < y < rows + 0.5 and -0.5 < x < columns + 0.5):
            continue
        cells = size / CELL
        width = max(0.6, cells / 6)
        bump = torch.exp(-((cell_y - y) ** 2 + (cell_x - x) ** 2) / (2 * width**2))
        bump[min(max(int(y), 0), rows - 1), min(max(int(x), 0), columns - 1)] = 1
        heatmap = torch.maximum(heatmap, weight * bump)
        near = torch.maximum((cell_y - y).abs(), (cell_x - x).abs()) <= max(1.0, cells / 4)
        log_size = torch.full_like(cell_y, math.log(max(size, 1.0) / REFERENCE_SIZE))
        found = torch.stack([log_size, y - cell_y, x - cell_x])
        values, weights = torch.where(near, found, values), torch.where(near, weight, weights)
    return heatmap, values, weights


def detection_loss(maps: Tensor, heatmaps: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Focal loss on the heatmap plus smooth L1 loss on size and centre."""
    logits = maps[:, 0].float()
    probabilities = logits.sigmoid()
    positive = heatmaps**4
    focal = positive * (1 - probabilities) ** 2 * F.logsigmoid(logits)
    focal = focal + (1 - positive) * (1 - heatmaps) ** 4 * probabilities**2 * F.logsigmoid(-logits)
    regression = F.smooth_l1_loss(maps[:, 1:].float(), values, reduction="none", beta=0.3).sum(1)
    count = (heatmaps >= 0.999).sum().clamp(min=1)
    return -focal.sum() / count + 0.5 * (regression * weights).sum() / weights.sum().clamp(min=1)


def train_finder(
    finder: Finder,
    pictures: LargePictures,
    places: Places,
    *,
    steps: int = 2400,
    each: int = 10,
    hard_negatives: bool = True,
    seed: int = 0,
    state: Path | None = None,
) -> Finder:
    """Train a finder on pictures and places. Its final weights are an exponential moving average.

    Args:
        each: number of crops per picture.
        hard_negatives: add crops around false positives after a third of the steps.
        state: a file from which an interrupted run resumes, removed at the end.
    """
    draw = np.random.default_rng(seed)
    small = [network_input(finder, picture) for _, picture in pictures.items()]
    crops = make_crops(pictures, small, places, places, each, draw)
    average = ModelEmaV3(finder.requires_grad_(True), decay=0.98)
    optimizer = torch.optim.AdamW(finder.parameters(), 3e-3, weight_decay=0.03)
    for step in training_steps(
        steps, finder, optimizer, "finder", clip=5.0, average=average, file=state, every=200, warmup=50
    ):
        if hard_negatives and step >= steps // 3:
            wrong = false_positives(detect(average.module, pictures, 6), places)
            more = make_crops(pictures, small, wrong, places, max(3, each // 3), draw)
            crops, hard_negatives = [torch.cat(columns) for columns in zip(crops, more, strict=True)], False
        rows = torch.from_numpy(draw.integers(0, len(crops[0]), BATCH))
        pixels, heatmaps, values, weights = (column[rows] for column in crops)
        x = with_random_tint(pixels, draw)
        if draw.random() < 0.5:
            x, heatmaps, values, weights = (column.flip(-1) for column in (x, heatmaps, values, weights))
            values = values * values.new_tensor([1, 1, -1])[:, None, None]
        detection_loss(finder.look.train()(x), heatmaps, values, weights).backward()
    finder.load_state_dict(average.module.state_dict())
    return finder.eval().requires_grad_(False)


def with_random_tint(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Scale uint8 pixels (B, 3, H, W) to about [−1, 1], with a random brightness and tint per image."""

    def random(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return torch.from_numpy(draw.uniform(low, high, (len(pixels), *shape))).float()

    x = (pixels.float() / 127.5) * random((1, 1, 1), 0.5, 1.5) - 1
    return x + random((3, 1, 1), -0.1, 0.1) + random((1, 1, 1), -0.14, 0.14)


def train_second_stage(
    first: Finder,
    pictures: LargePictures,
    places: Places,
    *,
    candidates: int = 40,
    steps: int = 1000,
    seed: int = 0,
) -> Finder:
    """Train a second stage to separate places from the first stage's false positives; returns a new finder."""
    finder: Any = build_policy({**first.describe(), "options": {**first.options, "candidates": candidates}})
    finder.look.load_state_dict(first.look.state_dict(), strict=False)
    network, draw = finder.look.second, np.random.default_rng(seed)
    assert network is not None
    network.train().requires_grad_(True)
    hits, likely, misses = second_stage_views(first, pictures, places, draw)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3, weight_decay=0.05)
    count, third = SECOND_BATCH, SECOND_BATCH // 3
    wanted = torch.cat([torch.ones(third), torch.zeros(count - third)])
    for _ in training_steps(steps, network, optimizer, "second stage", warmup=50):
        rows = torch.from_numpy(draw.integers(0, len(hits), third))
        others = torch.from_numpy(draw.integers(0, len(misses), count - third))
        pixels = torch.cat([hits[rows], misses[others]])
        mirrored = torch.from_numpy(draw.random(count) < 0.5)[:, None, None, None]
        pixels = with_random_tint(torch.where(mirrored, pixels.flip(-1), pixels), draw)
        weights = torch.cat([likely[rows], torch.ones(count - third)])
        F.binary_cross_entropy_with_logits(network(pixels), wanted, weights).backward()
    return finder.eval().requires_grad_(False)


def second_stage_views(
    first: Finder, pictures: LargePictures, places: Places, draw: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Training views for the second stage: of 40 detections per picture, and of 12 random squares around every place.

    Returns views of places, uint8 (M, 3, S, S), the probabilities of these places (M,), and views of false positives.
    """
    hits, likely, misses = [], [], []

    def view(picture: Tensor, y: float, x: float, size: float) -> Tensor:
        return as_bytes(glimpse_of(picture, y, x, VIEW_MARGIN * size, VIEW_SIDE))

    detected = detect(first, pictures, 40)
    wrong = false_positives(detected, places)
    for key, picture in pictures.items():
        found, known = detected[key], places.get(key, NO_PLACES)
        misses += [view(picture, y, x, size) for y, x, size, _ in wrong[key].tolist()]
        near = distances(found, known) < known[:, 2] / 2  # (40, places)
        for row, (y, x, size, _) in enumerate(found.tolist()):
            if near[row].any():
                hits.append(view(picture, y, x, size))
                likely.append(float(known[near[row], 3].max()))
        for y, x, size, weight in known.tolist():
            for _ in range(12):
                down, right = draw.normal(0, 0.12, 2) * size
                hits.append(view(picture, y + down, x + right, size * math.exp(draw.normal(0, 0.2))))
                likely.append(weight)
    return torch.stack(hits), torch.tensor(likely), torch.stack(misses)
