"""Windows of several sizes: accuracy against scale for every budget, and the sizes that a search wants.

The paper names windows of an adjustable size as its next step and has no figures for them, so all rows are ours.
"""

import math

import torch

from paper.backbone import Backbone
from paper.lab import Lab
from paper.plots import grouped_bars
from paper.statistics import difference, predicted, share
from paper.study import Result, Row, Study, cell, figure, pivot, signed, with_counts
from spot.evaluation.accuracy import Setting
from spot.placement.files import Placements
from spot.placement.sizes import auto_scale, tiling_scale

PRIOR = "isotropic"
SHARES = {"scale 1": 0.0, "¼ of tiling": 0.25, "½ of tiling": 0.5, "¾ of tiling": 0.75, "tiling": 1.0}
FREE = "searched, with scale"
GROWN = 1.02  # a window that a search left this much larger grew; by its inverse, it shrank


def run(lab: Lab) -> Result:
    """Isotropic windows at five scales per budget, each against scale 1; searches with and without scale."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        budgets = [tokens for tokens in lab.tokens if tiling(backbone, tokens) > 1]
        settings = {
            (name, tokens): [Setting(PRIOR, tokens, name=name, scale=tiling(backbone, tokens) ** part)]
            for tokens in budgets
            for name, part in SHARES.items()
        } | {("auto", tokens): [Setting(PRIOR, tokens, name="auto", scale="auto")] for tokens in budgets}
        made = lab.accuracies(backbone, settings)
        for (name, tokens), (predictions,) in made.items():
            first = made["scale 1", tokens][0]
            change = {} if predictions is first else difference(first.right, predictions.right)
            about: Row = {"backbone": backbone.name, "tokens": tokens, "size": name}
            scale = settings[name, tokens][0].scale
            if scale == "auto":
                scale = auto_scale(tokens, *backbone.model.img_size, backbone.model.patch_size)
            rows.append({**about, "scale": scale, **share(predictions.right), **change})
        rows += searched(lab, backbone)
    notes = [
        lab.differs(),
        "A scale of 1 is one sample per pixel; at tiling, windows together have the image's area; ½ is half of the way "
        "there in log scale; auto is the rule by which a retrofit places. Δ is against scale 1 on the same images.",
        f"Searches: 5 steps at 0.003 from {PRIOR} at {lab.sparse} tokens; with scale they start at auto and move the "
        f"logarithm of each window's scale too. A window grew or shrank if its scale changed by more than "
        f"{100 * (GROWN - 1):.0f} %.",
        "Weights decide which scale is best: a model that was never trained on large windows sees them as strange.",
    ]
    return Result(rows, [], notes)


def searched(lab: Lab, backbone: Backbone) -> list[Row]:
    """The search from scale 1 that moves positions alone, and the one from auto that moves sizes too."""
    if tiling(backbone, lab.sparse) <= 1:
        return []
    about: Row = {"backbone": backbone.name, "tokens": lab.sparse}
    own = backbone.model.scale in (None, 1)  # then other studies search from there too
    fixed = lab.oracle(backbone, PRIOR, scale=None if own else 1)
    free = lab.oracle(backbone, PRIOR, scale="auto")
    before, after = predicted(fixed), predicted(free)
    rows: list[Row] = [
        {**about, "size": "searched, scale 1", **share(before.right)},
        {**about, "size": FREE, **share(after.right), **difference(before.right, after.right)},
    ]
    return [*rows, {**about, "size": "what the search wants", **wanted(free)}]


def wanted(placements: Placements) -> Row:
    """How scales changed from the first to the last step: the median, how many grew, and where."""
    first, last = placements.trajectory[:, 0], placements.trajectory[:, -1]
    ratio = last[..., 2] / first[..., 2]
    middle = (first[..., :2] - 0.5).abs().amax(-1) < math.sqrt(0.5) / 2  # the inner half of the image's area
    row: Row = {"ratio": ratio.median().item()}
    row |= {"grew": 100 * (ratio > GROWN).float().mean().item()}
    row |= {"shrank": 100 * (ratio < 1 / GROWN).float().mean().item()}
    edges = torch.tensor([0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25])
    counts = torch.bincount(torch.bucketize(ratio.flatten(), edges), minlength=len(edges) + 1)
    row |= {"histogram": (100 * counts / counts.sum()).tolist(), "edges": edges.tolist()}
    for name, part in (("middle", middle), ("edge", ~middle)):
        row[f"ratio_{name}"] = ratio[part].mean().item() if bool(part.any()) else None
    return row


def tiling(backbone: Backbone, tokens: int) -> float:
    """The scale at which so many of the backbone's windows have the image's area."""
    model = backbone.model
    return tiling_scale(tokens, *model.img_size, model.patch_size)


def table(result: Result) -> list[Row]:
    """A line per backbone, budget and number of images; then a line per backbone about its searched sizes."""
    rows = [row for row in result.rows if "top1" in row]

    def with_change(row: Row) -> str:
        return cell(row) + (f" Δ {signed(row)}" if "delta" in row else "")

    lines = pivot(rows, ("backbone", "tokens", "images"), "size", with_change)
    for row in result.rows:
        if "ratio" in row:
            grew = f"{row['grew']:.0f} % grew, {row['shrank']:.0f} % shrank"
            parts = {name: row[f"ratio_{name}"] for name in ("middle", "edge")}
            inside = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value)
            told = f"scale × {row['ratio']:.2f} in the median ({inside} on average); {grew}"
            lines.append({"backbone": row["backbone"], "tokens": row["tokens"], FREE: told})
    return lines


def measured(result: Result) -> list[Row]:
    """The rows with an accuracy; names of searched ones say on how many images they are."""
    return [row for row in with_counts(result, "size") if "top1" in row]


def bars(result: Result) -> list[Row]:
    return [{**row, "group": f"{row['backbone']}, {row['tokens']} tokens"} for row in measured(result)]


STUDY = Study(
    "scale", "no table; named as its next step",
    "Which size of windows suits which budget, and do searches want larger or smaller ones?",
    run,
    figure(
        grouped_bars, bars, group="group", bar="size", value="top1",
        label="top-1 accuracy, %", title="Isotropic windows of several sizes, and searches with and without scale",
    ),
    table,
)  # fmt: skip
