"""Train a finder (spot/placement/finder.py) on large pictures.

The places of a picture are (n, 4): y, x and size in pixels, and the probability of an object as a weight. They come
from boxes, or from `spot.training.discovery`, which needs only picture labels.

The network is trained like CenterNet (Zhou et al., "Objects as Points", 2019), on crops of downscaled pictures, most
of them around places. The targets are a heatmap with a Gaussian at the centre of each object, and the object's size
and centre. After a third of the steps, crops around false positives are added. The second stage is then trained on
detections of the first stage and on views around the places.
"""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spot import report
from spot.data.pictures import Pictures
from spot.placement.finder import AROUND, CELL, USUAL, VIEW, Finder
from spot.placement.glimpses import cut_out
from spot.placement.policy import build_policy
from spot.training.optim import training_steps

CROP = (128, 192)  # height and width, in pixels of the downscaled picture
Places = Mapping[str, Tensor]


class Crops(NamedTuple):
    """Crops of downscaled pictures, and the network's targets."""

    pixels: Tensor  # uint8 (M, 3, h, w)
    heatmaps: Tensor  # (M, R, C), 1 at the centre of an object
    values: Tensor  # (M, 3, R, C): log size, y, x
    weights: Tensor  # (M, R, C): loss weights of the values


def shrink(finder: Finder, pictures: Pictures) -> list[Tensor]:
    """The pictures at the finder's input resolution, uint8."""
    small = []
    for index in report.track(range(len(pictures)), "shrinking", len(pictures)):
        picture = pictures.pixels(index).float()[None]
        small.append(finder.shrunk(picture)[0].round().clamp(0, 255).byte())
    return small


def make_crops(
    pictures: Pictures, small: list[Tensor], around: Places, places: Places, each: int, draw: np.random.Generator
) -> Crops:
    """Cut `each` randomly zoomed crops per picture, three quarters of them around one of its places in `around`."""
    made = []
    for index, key in enumerate(pictures.keys):
        shrunk, ratio = small[index], small[index].shape[2] / pictures.pixels(index).shape[2]
        height, width = shrunk.shape[1:]
        near, known = around.get(key, torch.zeros(0, 4)), places.get(key, torch.zeros(0, 4))
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
            crop = shrunk[:, top : top + rows, left : left + columns].float()[None]
            crop = F.interpolate(crop, CROP, mode="bilinear", align_corners=False)[0].round().byte()
            scale = known.new_tensor([CROP[0] / rows, CROP[1] / columns])
            inside = known.clone()
            inside[:, :2] = (known[:, :2] * ratio - known.new_tensor([top, left])) * scale / CELL
            inside[:, 2] = known[:, 2] * ratio * float(scale.prod().sqrt())
            made.append((crop, *target_maps(inside)))
    return Crops(*(torch.stack(column) for column in zip(*made, strict=True)))


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
        found = torch.stack([torch.full_like(cell_y, math.log(max(size, 1.0) / USUAL)), y - cell_y, x - cell_x])
        values, weights = torch.where(near, found, values), torch.where(near, weight, weights)
    return heatmap, values, weights


def loss_of(maps: Tensor, heatmaps: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Focal loss on the heatmap plus smooth L1 loss on size and centre."""
    logits = maps[:, 0].float()
    likely = logits.sigmoid()
    positive = heatmaps**4
    focal = positive * (1 - likely) ** 2 * F.logsigmoid(logits)
    focal = focal + (1 - positive) * (1 - heatmaps) ** 4 * likely**2 * F.logsigmoid(-logits)
    apart = F.smooth_l1_loss(maps[:, 1:].float(), values, reduction="none", beta=0.3).sum(1)
    count = (heatmaps >= 0.999).sum().clamp(min=1)
    return -focal.sum() / count + 0.5 * (apart * weights).sum() / weights.sum().clamp(min=1)


def train_finder(
    finder: Finder,
    pictures: Pictures,
    places: Places,
    *,
    steps: int = 2400,
    batch: int = 16,
    lr: float = 3e-3,
    each: int = 10,
    mine: bool = True,
    seed: int = 0,
    state: Path | None = None,
) -> Finder:
    """Train a finder on pictures and places. Its final weights are an exponential moving average.

    Args:
        each: number of crops per picture.
        mine: add crops around false positives after a third of the steps.
        state: a file from which an interrupted run resumes, removed at the end.
    """
    draw = np.random.default_rng(seed)
    small = shrink(finder, pictures)
    crops = make_crops(pictures, small, places, places, each, draw)
    network = finder.look.requires_grad_(True)
    mean = copy.deepcopy(finder).requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), lr, weight_decay=0.03)
    both, mined = nn.ModuleList([network, mean.look]), False
    for step in training_steps(steps, both, optimizer, "finder", file=state, every=200, warmup=50):
        if mine and step >= steps // 3 and not mined:
            wrong = false_positives(mean, pictures, small, places, 6)
            more = make_crops(pictures, small, wrong, places, max(3, each // 3), draw)
            crops, mined = Crops(*(torch.cat(columns) for columns in zip(crops, more, strict=True))), True
        rows = torch.from_numpy(draw.integers(0, len(crops.pixels), batch))
        pixels, *targets = augmented(crops, rows, draw)
        loss = loss_of(network.train()(pixels), *targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()
        with torch.no_grad():
            for kept, tensor in zip(mean.look.state_dict().values(), network.state_dict().values(), strict=True):
                kept.lerp_(tensor, 0.02) if kept.is_floating_point() else kept.copy_(tensor)
    network.load_state_dict(mean.look.state_dict())
    if state is not None:
        state.unlink(missing_ok=True)
    return finder.eval().requires_grad_(False)


def augmented(crops: Crops, rows: Tensor, draw: np.random.Generator) -> tuple[Tensor, ...]:
    """Network input and targets of some crops, with random brightness, colour and mirroring."""
    pixels, heatmaps, values, weights = (column[rows] for column in crops)
    x = color_jitter(pixels, draw)
    if draw.random() < 0.5:
        x, heatmaps, values, weights = (each.flip(-1) for each in (x, heatmaps, values, weights))
        values = values * values.new_tensor([1, 1, -1])[:, None, None]
    return x, heatmaps, values, weights


def color_jitter(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Scale uint8 pixels (B, 3, H, W) to about [−1, 1], with a random brightness and tint per image."""

    def random(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return torch.from_numpy(draw.uniform(low, high, (len(pixels), *shape))).float()

    x = (pixels.float() / 127.5) * random((1, 1, 1), 0.5, 1.5) - 1
    return x + random((3, 1, 1), -0.1, 0.1) + random((1, 1, 1), -0.14, 0.14)


@torch.no_grad()
def false_positives(
    finder: Finder, pictures: Pictures, small: list[Tensor], places: Places, count: int
) -> dict[str, Tensor]:
    """By key, those of a picture's `count` best detections that are not near a known place."""
    wrong = {}
    for index, key in enumerate(pictures.keys):
        found = places_found(finder, pictures.pixels(index), small[index], count)
        known = places.get(key, torch.zeros(0, 4))
        apart = (found[:, None, :2] - known[None, :, :2]).abs().amax(-1) > known[None, :, 2]
        wrong[key] = found[apart.all(1)]
    return wrong


def places_found(finder: Finder, picture: Tensor, small: Tensor, count: int) -> Tensor:
    """Detect places (count, 4) in one picture (3, H, W): y, x and size in pixels, and the score."""
    maps = finder.look.eval()(small.float()[None] / 127.5 - 1)
    found = finder.best(maps, picture.float()[None] / 127.5 - 1, count)
    size = found.glimpses[0, :, 2:] / finder.margin
    middle = found.glimpses[0, :, :2] * found.glimpses.new_tensor(picture.shape[1:])
    return torch.cat([middle, size, found.scores[0, :, None]], 1)


class Views(NamedTuple):
    """Views of places and of false positives, for the second stage."""

    places: Tensor  # uint8 (M, 3, S, S)
    weights: Tensor  # (M,), the probabilities of the places
    others: Tensor  # uint8 (L, 3, S, S)


def train_second_stage(
    first: Finder,
    pictures: Pictures,
    places: Places,
    *,
    candidates: int = 40,
    steps: int = 1000,
    batch: int = 128,
    lr: float = 3e-3,
    seed: int = 0,
) -> Finder:
    """Train a second stage to separate places from the first stage's false positives; returns a new finder."""
    finder: Any = build_policy({**first.describe(), "options": {**first.options, "candidates": candidates}})
    finder.look.load_state_dict(first.look.state_dict(), strict=False)
    network, draw = finder.look.second, np.random.default_rng(seed)
    assert network is not None
    network.train().requires_grad_(True)
    views = second_stage_views(first, pictures, places, draw)
    optimizer = torch.optim.AdamW(network.parameters(), lr, weight_decay=0.05)
    third = batch // 3
    wanted = torch.cat([torch.ones(third), torch.zeros(batch - third)])
    for _ in training_steps(steps, network, optimizer, "second stage", warmup=50):
        rows = torch.from_numpy(draw.integers(0, len(views.places), third))
        others = torch.from_numpy(draw.integers(0, len(views.others), batch - third))
        pixels = torch.cat([views.places[rows], views.others[others]])
        mirrored = torch.from_numpy(draw.random(batch) < 0.5)[:, None, None, None]
        pixels = color_jitter(torch.where(mirrored, pixels.flip(-1), pixels), draw)
        weights = torch.cat([views.weights[rows], torch.ones(batch - third)])
        loss = F.binary_cross_entropy_with_logits(network(pixels), wanted, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return finder.eval().requires_grad_(False)


@torch.no_grad()
def second_stage_views(
    first: Finder, pictures: Pictures, places: Places, draw: np.random.Generator, count: int = 40, each: int = 12
) -> Views:
    """Training views for the second stage: `count` detections per picture, and `each` random views per place."""
    positive, weights, others = [], [], []

    def view(picture: Tensor, y: float, x: float, size: float) -> Tensor:
        height, width = picture.shape[1:]
        side = min(max(4.0, AROUND * size), float(min(height, width)))
        y, x = min(max(y, 0.0), float(height)), min(max(x, 0.0), float(width))
        return cut_out(picture, y, x, side, VIEW).round().clamp(0, 255).byte()

    for index, (key, small) in enumerate(zip(pictures.keys, shrink(first, pictures), strict=True)):
        picture, known = pictures.pixels(index), places.get(key, torch.zeros(0, 4))
        found = places_found(first, picture, small, count)
        apart = (found[:, None, :2] - known[None, :, :2]).abs().amax(-1)  # (count, places)
        for row, (y, x, size, _) in enumerate(found.tolist()):
            hits = apart[row] < known[:, 2] / 2
            if hits.any():
                positive.append(view(picture, y, x, size))
                weights.append(float(known[hits, 3].max()))
            elif (apart[row] > known[:, 2]).all():
                others.append(view(picture, y, x, size))
        for y, x, size, weight in known.tolist():
            for _ in range(each):
                down, right = draw.normal(0, 0.12, 2) * size
                positive.append(view(picture, y + down, x + right, size * math.exp(draw.normal(0, 0.2))))
                weights.append(weight)
    return Views(torch.stack(positive), torch.tensor(weights), torch.stack(others))
