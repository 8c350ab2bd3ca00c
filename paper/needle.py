"""A small object in a large picture: accuracy and cost as the picture grows at a constant number of tokens.

The paper has no such table, so all rows are ours. Scenes are those of the data set `needle`, with an object of 24 to
40 pixels at every image size. Photographs are placed on a canvas four times as large (paper/canvas.py), which is
a stress test and not a real data set. All placements use the same weights; costs include the saliency map.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from paper.backbone import Backbone, backbones
from paper.canvas import CanvasSources, box_of
from paper.lab import Lab
from paper.sources import scene_masks
from paper.statistics import accuracy_row, difference
from paper.study import Result, Row, Study, Table, cell, figure, signed
from spot.data.difficulty import difficulty_of
from spot.evaluation.accuracy import Setting, model_of
from spot.evaluation.cost import macs
from spot.models.baselines import BASELINES
from spot.models.spot_vit import SpotViT
from spot.placement.files import Placements
from spot.placement.policy import Policy
from spot.placement.priors import equal_shares
from spot.placement.saliency import rgb, spectral_macs, spectral_residual
from spot.plots.accuracy import accuracy

BUILT_IN = "scenes-needle"
SIZES = (128, 192, 256)  # pixels a side
TOKENS, OF_PHOTOGRAPHS = 64, 196
DENSE, TOLD, SPECTRAL, STRONGLY = "dense grid", "told the box", "spectral focus", "spectral, as strongly"
STRENGTH = 0.9  # of the box against even coverage, where the model has no policy whose strength could be used


def run(lab: Lab) -> Result:
    """Every placement at every image size, compared with the dense grid on the same images."""
    rows: list[Row] = []
    given = lab.settings
    if given.scenes:
        any_size = [each for each in lab.backbones if each.model.vit.pos_embed is None]
        chosen, sizes = any_size or backbones([BUILT_IN], lab.state.device), SIZES
        data = {size: f"needle:{size}" for size in sizes}
    else:
        chosen = lab.backbones
        data = {2 * lab.backbones[0].model.img_size[0]: given.data}
    for size, name in data.items():
        there = Lab(chosen, replace(given, data=name, saliency="spectral"), cache=lab.cache.folder)
        if not given.scenes:
            there.sources = CanvasSources(there.settings)
        for backbone in chosen:
            for tokens in given.tokens or (TOKENS if given.scenes else OF_PHOTOGRAPHS,):
                rows += measured(there, backbone, size, tokens)
    kind = "scenes, whose object has 24 to 40 pixels" if given.scenes else "photographs in a canvas: a stress test"
    notes = [
        f"{', '.join(each.name for each in chosen)} on {rows[0]['images']:,} {kind}, with 95 % intervals. The paper "
        "has no such table.",
        "Δ is relative to the dense grid on the same images. kept is the share of its accuracy, and cost the share of "
        "its multiply-adds, with those of the policy or map. All rows have the same weights, which were trained for "
        "windows (even placement and the dense grid among them), not for smaller images.",
        f"{SPECTRAL}: `focus` on spectral-residual maps. learned: the model's policy. {STRONGLY}: the policy's rule on "
        f"spectral maps. {TOLD}: the policy's rule on a map that is 1 in the true box and 0 elsewhere. No method knows "
        "this box.",
    ]
    if any(each.model.policy is None for each in chosen):
        notes.append("Without a policy (spot learn) there is no row learned.")
    models = {each.name: each.describe() for each in chosen}
    settings = {"models": models, "data": [Path(name).name for name in data.values()], "saliency": "spectral"}
    return Result(rows, [], notes, settings)


def measured(lab: Lab, backbone: Backbone, size: int, tokens: int) -> list[Row]:
    """The rows of one image size and budget."""
    made = candidates(lab, backbone, size, tokens)
    outcomes = lab.accuracy(backbone, made)
    costs = {name: cost(candidate, size) for name, candidate in made.items()}
    rows: list[Row] = []
    for name, outcome in outcomes.items():
        row: Row = {"backbone": backbone.name, "pixels": size, "tokens": tokens, "placement": name}
        row |= {"used": made[name].tokens, **accuracy_row(outcome.right), "gmacs": costs[name] / 1e9}
        row |= {"cost": costs[name] / costs[DENSE]}
        if name != DENSE:
            dense = outcomes[DENSE].right
            row |= {"kept": 100 * row["top1"] / max(1e-9, 100 * dense.double().mean().item())}
            row |= difference(dense, outcome.right)
        rows.append(row)
    return rows


def candidates(lab: Lab, backbone: Backbone, size: int, tokens: int) -> dict[str, Setting]:
    """The settings to compare, by name."""
    model = backbone.at(tokens, (size, size))
    cells = (size // model.patch_size) ** 2
    compared = {
        DENSE: Setting("isotropic", cells, name=DENSE, model=backbone.at(cells, (size, size))),
        "smaller image": Setting(name="smaller image", model=BASELINES["resize"].build(backbone.loaded, tokens)),
        "isotropic": Setting("isotropic", tokens, model=model),
        SPECTRAL: Setting("focus", tokens, name=SPECTRAL, model=model),
    }
    if isinstance(model.policy, Policy):
        compared[STRONGLY] = Setting(spectral(model.policy, model), tokens, name=STRONGLY, model=model)
        compared["learned"] = Setting("learned", tokens, model=model)
    keys = lab.sources.images(model).keys
    placed = told(model, boxes(keys, lab.settings.data), size, tokens)
    compared[TOLD] = Setting(Placements(list(keys), placed), name=TOLD, model=model)
    return {name: lab.candidate(backbone, setting) for name, setting in compared.items()}


def spectral(policy: Policy, model: SpotViT) -> Callable[..., Tensor]:
    """A prior with the rule of the model's policy on spectral-residual saliency maps."""

    def place(images: Tensor, tokens: int, generator: Generator | None = None) -> Tensor:
        maps = spectral_residual(rgb(images, model.data_config))
        return policy.place(maps / maps.sum((1, 2), keepdim=True), images, tokens)

    place.random = False  # type: ignore[attr-defined]
    return place


def boxes(keys: Sequence[str], data: str) -> Tensor:
    """Top, left, bottom and right (M, 4) of each image's object, as fractions, by its key and the data's name."""
    difficulty = difficulty_of(data)
    if difficulty is None:
        return torch.tensor([box_of(key) for key in keys], dtype=torch.float64)
    found = []
    for first in range(0, len(keys), 64):
        for mask in scene_masks(keys[first : first + 64], data) > 0:
            rows, columns = (mask.any(axis).nonzero()[:, 0] for axis in (1, 0))
            found.append(torch.stack([rows[0], columns[0], rows[-1] + 1, columns[-1] + 1]))
    return torch.stack(found).double() / difficulty.image_size


def told(model: SpotViT, at: Tensor, size: int, tokens: int) -> Tensor:
    """Positions (M, N, 2) by the policy's rule on maps that are the boxes (M, 4)."""
    places = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    inside = [(places >= at[:, axis, None]) & (places < at[:, axis + 2, None]) for axis in (0, 1)]
    strength = model.policy.strength if isinstance(model.policy, Policy) else STRENGTH
    strength *= 1 - tokens / (size // model.patch_size) ** 2
    positions = []
    for rows, columns in zip(*(each.double() for each in inside), strict=True):
        density = (rows[:, None] * columns)[None]
        positions.append(equal_shares(density / density.sum(), strength, torch.empty(1, 3, size, size), tokens))
    return torch.cat(positions).float()


def cost(candidate: Setting, size: int) -> int:
    """Multiply-adds of one image's prediction, including its placement."""
    model, shape = model_of(candidate).spot_vit, (3, size, size)
    if candidate.placement == "learned":
        return macs(model_of(candidate), shape)
    looked = spectral_macs(size) if candidate.name in (SPECTRAL, STRONGLY) else 0
    return macs(model, shape, candidate.tokens) + looked


TABLE: Table = {
    "backbone": "backbone", "image": lambda row: f"{row['pixels']} × {row['pixels']}", "placement": "placement",
    "tokens": "used", "top-1": cell, "Δ": signed, "kept": lambda row: f"{row['kept']:.0f} %" if "kept" in row else "",
    "multiply-adds": lambda row: f"{1e3 * row['gmacs']:,.0f} M",
    "cost": lambda row: f"1/{1 / row['cost']:.1f}" if row["cost"] < 0.995 else "1",
}  # fmt: skip


def points(result: Result) -> list[Row]:
    """Points of the figure: accuracy against image size, and against cost."""
    shown = ("backbone", "placement", "pixels", "gmacs", "top1", "low", "high")
    several = len({row["tokens"] for row in result.rows}) > 1
    named = [{**row, "placement": f"{row['placement']}, {row['tokens']}"} if several else row for row in result.rows]
    return [{name: row[name] for name in shown} for row in named]


def draw(result: Result) -> Figure:
    """One model against image size and against cost; several models each in a panel against cost."""
    title = "A small object in a large picture: {tokens} tokens, and the dense grid"
    if len({row["backbone"] for row in result.rows}) == 1:
        return figure(accuracy, points, title=title)(result)
    cost = {"across": "gmacs", "value": "top1", "across_label": "multiply-adds per image, in billions", "log": False}
    return figure(accuracy, points, title=title, panel="backbone", **cost)(result)


STUDY = Study(
    "needle", "no table; ours",
    "A small object in a large picture: how much of the dense grid's accuracy do few tokens keep, and at what cost?",
    run, draw, TABLE,
)  # fmt: skip
