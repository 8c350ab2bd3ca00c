"""Train a finder (spot/placement/finder.py) to find places in large pictures.

Places are (n, 4) for each picture: y, x and size in pixels, and a weight from 0 to 1, how sure one is of them. They
come from boxes, or from `spot.training.discovery`, which needs the labels of whole pictures only.

The network is trained on crops of shrunk pictures, most of them around places, as CenterNet is (Zhou et al., "Objects
as Points", 2019): a bump around the middle of each thing, and its size and middle where it is. After a third of the
steps crops are added around places that it finds and that are none. Its second stage is then trained on what the
first one finds, and on views around the places.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spot import report
from spot.data.pictures import Pictures
from spot.placement.finder import AROUND, CELL, USUAL, VIEW, Finder, build_finder
from spot.placement.glimpses import cut_out
from spot.store import read_state, write_state

CROP = (128, 192)  # pixels of the shrunk picture
Places = Mapping[str, Tensor]


class Pool(NamedTuple):
    """Crops of shrunk pictures, and what the network is to say of them."""

    pixels: Tensor  # bytes (M, 3, h, w)
    bumps: Tensor  # (M, R, C), 1 at the middle of a thing
    values: Tensor  # (M, 3, R, C): log size, y, x
    weights: Tensor  # (M, R, C): of those


def shrink(finder: Finder, pictures: Pictures) -> list[Tensor]:
    """The pictures as the finder sees them, bytes."""
    small = []
    for index in report.track(range(len(pictures)), "shrinking", len(pictures)):
        picture = pictures.pixels(index).float()[None]
        small.append(finder.shrunk(picture)[0].round().clamp(0, 255).byte())
    return small


def make_pool(
    pictures: Pictures, small: list[Tensor], around: Places, places: Places, each: int, draw: np.random.Generator
) -> Pool:
    """`each` crops of every picture, three of four around one of its places `around`, zoomed at random."""
    made = []
    for index, key in enumerate(pictures.keys):
        shrunk, ratio = small[index], small[index].shape[2] / pictures.pixels(index).shape[2]
        height, width = shrunk.shape[1:]
        near, own = around.get(key, torch.zeros(0, 4)), places.get(key, torch.zeros(0, 4))
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
            scale = own.new_tensor([CROP[0] / rows, CROP[1] / columns])
            inside = own.clone()
            inside[:, :2] = (own[:, :2] * ratio - own.new_tensor([top, left])) * scale / CELL
            inside[:, 2] = own[:, 2] * ratio * float(scale.prod().sqrt())
            made.append((crop, *wanted(inside)))
    return Pool(*(torch.stack(column) for column in zip(*made, strict=True)))


def wanted(places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bumps (R, C), values (3, R, C) and their weights (R, C) for places (n, 4).

    These are y and x in cells, size in pixels of the crop, weight.
    """
    rows, columns = CROP[0] // CELL, CROP[1] // CELL
    bumps, values, weights = torch.zeros(rows, columns), torch.zeros(3, rows, columns), torch.zeros(rows, columns)
    cell_y, cell_x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
    for y, x, size, weight in places.tolist():
        if not (-0.5 < y < rows + 0.5 and -0.5 < x < columns + 0.5):
            continue
        cells = size / CELL
        width = max(0.6, cells / 6)
        bump = torch.exp(-((cell_y - y) ** 2 + (cell_x - x) ** 2) / (2 * width**2))
        bump[min(max(int(y), 0), rows - 1), min(max(int(x), 0), columns - 1)] = 1
        bumps = torch.maximum(bumps, weight * bump)
        near = torch.maximum((cell_y - y).abs(), (cell_x - x).abs()) <= max(1.0, cells / 4)
        found = torch.stack([torch.full_like(cell_y, math.log(max(size, 1.0) / USUAL)), y - cell_y, x - cell_x])
        values, weights = torch.where(near, found, values), torch.where(near, weight, weights)
    return bumps, values, weights


def loss_of(maps: Tensor, bumps: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Focal loss of the bumps, in places, and a smooth L1 loss of size and middle."""
    logits = maps[:, 0].float()
    likely = logits.sigmoid()
    sure = bumps**4
    focal = sure * (1 - likely) ** 2 * F.logsigmoid(logits)
    focal = focal + (1 - sure) * (1 - bumps) ** 4 * likely**2 * F.logsigmoid(-logits)
    apart = F.smooth_l1_loss(maps[:, 1:].float(), values, reduction="none", beta=0.3).sum(1)
    count = (bumps >= 0.999).sum().clamp(min=1)
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
    """Train a finder on pictures and places; its weights in the end are their running mean.

    Args:
        each: crops of every picture.
        mine: after a third of the steps, add crops around what it finds where nothing is.
        state: a file from which an interrupted run goes on, removed in the end.
    """
    draw = np.random.default_rng(seed)
    small = shrink(finder, pictures)
    pool = make_pool(pictures, small, places, places, each, draw)
    look = finder.look
    look.requires_grad_(True)
    optimizer = torch.optim.AdamW(look.parameters(), lr, weight_decay=0.03)
    mean = {name: tensor.clone() for name, tensor in look.state_dict().items()}
    first, mined = 0, False
    if state is not None and state.is_file():
        saved = read_state(state)
        look.load_state_dict(saved["look"])
        optimizer.load_state_dict(saved["optimizer"])
        mean, first = saved["mean"], saved["step"]
    for step in report.track(range(first, steps), "finder", steps - first):
        if mine and step >= steps // 3 and not mined:
            pool, mined = joined(pool, mistaken(finder, pictures, small, places, mean, max(3, each // 3), draw)), True
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2 + 1e-6
        rows = torch.from_numpy(draw.integers(0, len(pool.pixels), batch))
        loss = loss_of(*seen_now(look.train(), pool, rows, draw))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(look.parameters(), 5.0)
        optimizer.step()
        with torch.no_grad():
            for name, tensor in look.state_dict().items():
                mean[name].lerp_(tensor, 0.02) if tensor.is_floating_point() else mean[name].copy_(tensor)
        if state is not None and step % 200 == 199:
            now = {"look": look.state_dict(), "optimizer": optimizer.state_dict(), "mean": mean, "step": step + 1}
            write_state(state, now)
    look.load_state_dict(mean)
    if state is not None:
        state.unlink(missing_ok=True)
    return finder.eval().requires_grad_(False)


def seen_now(look: nn.Module, pool: Pool, rows: Tensor, draw: np.random.Generator) -> tuple[Tensor, ...]:
    """What the network says of some crops, in other light and half of the time mirrored, and what it is to say."""
    pixels, bumps, values, weights = (column[rows] for column in pool)
    x = in_other_light(pixels, draw)
    if draw.random() < 0.5:
        x, bumps, values, weights = (each.flip(-1) for each in (x, bumps, values, weights))
        values = values * values.new_tensor([1, 1, -1])[:, None, None]
    return look(x), bumps, values, weights


def in_other_light(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Bytes (B, 3, H, W) as the network sees them, from -1 to 1, with another brightness and tint each."""

    def random(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return torch.from_numpy(draw.uniform(low, high, (len(pixels), *shape))).float()

    x = (pixels.float() / 127.5) * random((1, 1, 1), 0.5, 1.5) - 1
    return x + random((3, 1, 1), -0.1, 0.1) + random((1, 1, 1), -0.14, 0.14)


@torch.no_grad()
def mistaken(
    finder: Finder,
    pictures: Pictures,
    small: list[Tensor],
    places: Places,
    weights: Mapping[str, Tensor],
    each: int,
    draw: np.random.Generator,
) -> Pool:
    """Crops around what the finder, with these weights, finds where no place is."""
    now = {name: tensor.clone() for name, tensor in finder.look.state_dict().items()}
    finder.look.load_state_dict(weights)
    wrong = {}
    for index, key in enumerate(pictures.keys):
        found = places_found(finder, pictures.pixels(index), small[index], 6)
        known = places.get(key, torch.zeros(0, 4))
        apart = (found[:, None, :2] - known[None, :, :2]).abs().amax(-1) > known[None, :, 2]
        wrong[key] = found[apart.all(1)]
    finder.look.load_state_dict(now)
    return make_pool(pictures, small, wrong, places, each, draw)


def places_found(finder: Finder, picture: Tensor, small: Tensor, count: int) -> Tensor:
    """The places (count, 4) of one picture (3, H, W): y, x, size in pixels, and the score."""
    maps = finder.look.eval()(small.float()[None] / 127.5 - 1)
    found = finder.best(maps, picture.float()[None] / 127.5 - 1, count)
    size = found.glimpses[0, :, 2:] / finder.margin
    middle = found.glimpses[0, :, :2] * found.glimpses.new_tensor(picture.shape[1:])
    return torch.cat([middle, size, found.scores[0, :, None]], 1)


class Seen(NamedTuple):
    """Views of places and of what is none, for the second stage."""

    there: Tensor  # bytes (M, 3, S, S)
    weights: Tensor  # (M,), how sure one is of them
    elsewhere: Tensor  # bytes (L, 3, S, S)


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
    """A finder with this first stage, and a second one that tells places from what else the first one finds."""
    options = {**first.options, "candidates": candidates}
    finder = build_finder({**first.describe(), "options": options})
    finder.look.load_state_dict(first.look.state_dict(), strict=False)
    look, draw = finder.look.second, np.random.default_rng(seed)
    assert look is not None
    look.train().requires_grad_(True)
    seen = views_for_second(first, pictures, places, draw)
    optimizer = torch.optim.AdamW(look.parameters(), lr, weight_decay=0.05)
    for step in report.track(range(steps), "second stage", steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2
        third = batch // 3
        rows = torch.from_numpy(draw.integers(0, len(seen.there), third))
        others = torch.from_numpy(draw.integers(0, len(seen.elsewhere), batch - third))
        pixels = torch.cat([seen.there[rows], seen.elsewhere[others]])
        mirrored = torch.from_numpy(draw.random(batch) < 0.5)[:, None, None, None]
        pixels = torch.where(mirrored, pixels.flip(-1), pixels)
        wanted = torch.cat([torch.ones(third), torch.zeros(batch - third)])
        weights = torch.cat([seen.weights[rows], torch.ones(batch - third)])
        loss = F.binary_cross_entropy_with_logits(look(in_other_light(pixels, draw)), wanted, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return finder.eval().requires_grad_(False)


@torch.no_grad()
def views_for_second(
    first: Finder, pictures: Pictures, places: Places, draw: np.random.Generator, count: int = 40, each: int = 12
) -> Seen:
    """What the second stage learns from: the first one's `count` peaks, and `each` views around every place."""
    there, weights, elsewhere = [], [], []

    def view(picture: Tensor, y: float, x: float, size: float) -> Tensor:
        height, width = picture.shape[1:]
        side = min(max(4.0, AROUND * size), float(min(height, width)))
        y, x = min(max(y, 0.0), float(height)), min(max(x, 0.0), float(width))
        return cut_out(picture, y, x, side, VIEW).round().clamp(0, 255).byte()

    for index, key in enumerate(report.track(pictures.keys, "candidates", len(pictures))):
        picture, known = pictures.pixels(index), places.get(key, torch.zeros(0, 4))
        small = first.shrunk(picture.float()[None])[0].round().clamp(0, 255).byte()
        found = places_found(first, picture, small, count)
        apart = (found[:, None, :2] - known[None, :, :2]).abs().amax(-1)  # (count, places)
        for row, (y, x, size, _) in enumerate(found.tolist()):
            hits = apart[row] < known[:, 2] / 2
            if hits.any():
                there.append(view(picture, y, x, size))
                weights.append(float(known[hits, 3].max()))
            elif (apart[row] > known[:, 2]).all():
                elsewhere.append(view(picture, y, x, size))
        for y, x, size, weight in known.tolist():
            for _ in range(each):
                down, right = draw.normal(0, 0.12, 2) * size
                there.append(view(picture, y + down, x + right, size * math.exp(draw.normal(0, 0.2))))
                weights.append(weight)
    return Seen(torch.stack(there), torch.tensor(weights), torch.stack(elsewhere))


def joined(one: Pool, other: Pool) -> Pool:
    return Pool(*(torch.cat(columns) for columns in zip(one, other, strict=True)))
