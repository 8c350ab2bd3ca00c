"""Do placements transfer? Positions searched with one model, used by another, for all ordered pairs.

The difference is the gain from transfer, as in the paper's table; its equation has the opposite sign. The controls are
isotropic tokens moved equally far in random directions, and positions searched for another image.
"""

import torch

from paper.backbone import Backbone
from paper.classification import PAPER_ISOTROPIC
from paper.lab import PAPER_IMAGES, Lab
from paper.plots import grouped_bars
from paper.statistics import accuracy_row, difference, predicted
from paper.study import Result, Row, Study, Table, cell, figure, number, signed
from spot.errors import InputError
from spot.placement.files import Placements
from spot.placement.oracle import moved_at_random

# Source, target, and the target's accuracy with the source's positions.
PAPER = (
    ("CLS-IN1k", "CLS-IN21k", 54.06),
    ("MAE-IN1k", "CLS-IN21k", 56.71),
    ("CLS-IN21k", "CLS-IN1k", 37.91),
    ("MAE-IN1k", "CLS-IN1k", 39.19),
    ("CLS-IN21k", "MAE-IN1k", 68.50),
    ("CLS-IN1k", "MAE-IN1k", 67.81),
)
CONTROLS = ("jittered", "another")


def run(lab: Lab) -> Result:
    """Every source's searched positions, used by every other model."""
    if len(lab.backbones) < 2:
        raise InputError("transfer is between models; give at least two with --model")
    rows: list[Row] = []
    for source in lab.backbones:
        for target in lab.backbones:
            if source is target:
                continue
            own = lab.oracle(target)
            original = predicted(own, 0)
            right = {name: lab.at(target, each).right for name, each in placed(lab, source).items()}
            row: Row = {"source": source.name, "target": target.name, "tokens": lab.sparse}
            row |= {"original": accuracy_row(original.right)["top1"], "own": accuracy_row(predicted(own).right)["top1"]}
            row |= {name: accuracy_row(right[name])["top1"] for name in CONTROLS}
            row |= accuracy_row(right["transfer"], "transfer") | difference(original.right, right["transfer"])
            rows.append(row | difference(right["another"], right["transfer"], "excess"))
    notes = [
        lab.conditions(),
        "Δ: the target's accuracy with the source's positions minus its accuracy with isotropic tokens, on the same "
        "images. p: McNemar's exact test. own: with positions found by the target itself.",
        "Controls. jittered: isotropic tokens moved in random directions, by the same distance as in the source's "
        "search. another image's: the source's positions of the next image. excess: transfer minus another image's, "
        "the part that depends on the image.",
        "Error in the paper: its equation for Δ has the opposite sign. Its table, like this one, shows the gain of "
        "transfer.",
    ]
    return Result(rows, paper_rows(), notes)


def placed(lab: Lab, source: Backbone) -> dict[str, Placements]:
    """The source's positions, and both controls."""
    found = lab.oracle(source)
    keys = sorted(found.keys)
    start, end = (found.positions_for(keys, step) for step in (0, -1))
    jittered = moved_at_random(start, end, source.model.img_size, torch.Generator().manual_seed(0))
    moves = {"transfer": end, "jittered": jittered, "another": end.roll(1, 0)}
    return {name: Placements(keys, positions) for name, positions in moves.items()}


def paper_rows() -> list[Row]:
    return [
        {"source": f"paper: {source}", "target": f"paper: {target}", "tokens": 25, "original": PAPER_ISOTROPIC[target]}
        | {"transfer": moved, "delta": round(moved - PAPER_ISOTROPIC[target], 2), "images": PAPER_IMAGES}
        for source, target, moved in PAPER
    ]


TABLE: Table = {
    "source → target": lambda row: f"{row['source']} → {row['target'].removeprefix('paper: ')}",
    "tokens": "tokens", "original %": "original", "transfer %": lambda row: cell(row, "transfer"), "Δ": signed,
    "p": number("p", ".2g"), "jittered %": "jittered", "another image's %": "another",
    "excess": lambda row: signed(row, "excess"), "own %": "own", "images": "images",
}  # fmt: skip


def cells(result: Result) -> list[Row]:
    rows = [(row, "ours") for row in result.rows] + [(row, "the paper's") for row in result.paper]
    return [
        {**row, "whose": whose, **{end: row[end].removeprefix("paper: ") for end in ("source", "target")}}
        for row, whose in rows
    ]


STUDY = Study(
    "transfer", "tab:transfer",
    "Do searched placements transfer: is a model more accurate at positions that another model found?",
    run,
    figure(
        grouped_bars, cells, group="target", bar="source", value="delta", low="delta_low", high="delta_high",
        panel="whose", label="change in top-1, points",
        title="Positions searched with one model (colour), used by another",
    ),
    TABLE,
)  # fmt: skip
