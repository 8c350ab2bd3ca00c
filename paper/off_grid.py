"""Are grids a limitation? Searched positions, on the grid and off it, at about 12.5 % of the tokens.

The paper moves the final positions of a search to the nearest cells, which makes them much worse. This is a move by
several pixels, and any such move may have the same effect. As controls, searched positions are also moved by the same
distance in random directions, rounded to whole pixels, and jittered. In addition a search restricted to cells is
compared with a search that makes the same trials off the grid (paper/trial_search.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from paper.backbone import Backbone
from paper.lab import Lab
from paper.plots import grouped_bars
from paper.statistics import Predictions, accuracy_row, difference, predicted
from paper.study import Result, Row, Study, Table, cell, figure, number, paper_row, signed
from paper.trial_search import jittered, trial_search, whole_pixels
from spot.data.loader import loader
from spot.evaluation.accuracy import Setting
from spot.placement.files import Placements
from spot.placement.oracle import PRESETS, SearchSettings, moved_at_random, snapped
from spot.store import decode_names, encode_names

PRIOR, GRID, SUBPIXEL = "prior", "oracle, grid", "oracle, subpixel"
MOVED, PIXELS = "moved as far, any direction", "rounded to whole pixels"
JITTERS = {f"jittered by up to {pixels} px": pixels for pixels in (1, 2, 4)}
TRIALS, FREE_TRIALS = "trials on the grid", "trials off the grid"
STEP = 2.2  # cost of a step of the gradient search, with its backward pass, in forward passes

PAPER: list[Row] = [
    {"placement": PRIOR, "top1": 61.7},
    {"placement": GRID, "lr": 3e-3, "steps": 5, "top1": 66.2},
    {"placement": GRID, "lr": 1e-2, "steps": 10, "top1": 74.0},
    {"placement": SUBPIXEL, "lr": 3e-3, "steps": 5, "top1": 90.2, "delta": 24.0},
    {"placement": SUBPIXEL, "lr": 1e-2, "steps": 10, "top1": 90.9, "delta": 16.9},
]


def run(lab: Lab) -> Result:
    """Both of the paper's searches from isotropic, with controls; differences are on the same images."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        about = {"backbone": backbone.name, "tokens": lab.sparse}
        start = predicted(lab.oracle(backbone), 0)
        rows.append({**about, "placement": PRIOR, **accuracy_row(start.right)})
        for preset in (PRESETS["paper"], PRESETS["paper-long"]):
            rows += [
                {**about, "steps": preset.steps, "lr": preset.lr, **row} for row in searched(lab, backbone, preset)
            ]
    notes = [
        lab.conditions(),
        "moved is the mean distance of tokens from their searched positions. gain over grid is relative to the row "
        f"“{GRID}” of the same search, and for “{FREE_TRIALS}” to “{TRIALS}”, on the same images. p: McNemar's exact "
        "test.",
        f"The paper's design compares “{SUBPIXEL}” with “{GRID}”. Two comparisons isolate the grid: “{MOVED}” with "
        f"“{GRID}” (moves of the same length) and “{FREE_TRIALS}” with “{TRIALS}” (the same search). Trials have as "
        f"many forward passes as the search costs; a step with its backward pass counts as {STEP}.",
        f"The search uses the label, and {lab.sparse} of {len(lab.backbones[0].model.grid())} tokens (the paper: 25 of "
        f"196). In “{GRID}” two tokens may share a cell, as in the paper; in “{TRIALS}” no token moves into an "
        "occupied cell.",
    ]
    return Result(rows, [paper_row("MAE-IN1k", tokens=25, **row) for row in PAPER], notes)


def searched(lab: Lab, backbone: Backbone, preset: SearchSettings) -> list[Row]:
    """One search's rows: its final positions, the same moved in several ways, and a trial search at the same cost."""
    placements, model = lab.oracle(backbone, preset=preset), backbone.at(lab.sparse)
    size, ends = model.img_size, placements.positions_for(sorted(placements.keys))
    on_grid = snapped(ends, model.grid_size)
    moves: dict[str, Callable[[torch.Generator], Tensor]] = {
        GRID: lambda _: on_grid,
        MOVED: lambda generator: moved_at_random(ends, on_grid, size, generator),
        PIXELS: lambda _: whole_pixels(ends, size, model.patch_size),
    }
    for name, pixels in JITTERS.items():
        moves[name] = lambda generator, pixels=pixels: jittered(ends, pixels, size, generator)  # type: ignore[misc]
    keys, there = sorted(placements.keys), predicted(placements)
    rows: list[Row] = []
    right: dict[str, Tensor] = {}
    for name, move in moves.items():
        positions = move(torch.Generator().manual_seed(0))
        right[name] = lab.at(backbone, Placements(keys, positions)).on(there.keys).right
        row: Row = {"placement": name, "moved": distance(ends, positions, size), **accuracy_row(right[name])}
        rows.append(row | (difference(right[GRID], right[name]) if name == MOVED else {}))
    rows.append({"placement": SUBPIXEL, **accuracy_row(there.right), **difference(right[GRID], there.right)})
    passes = round(1 + STEP * preset.steps)
    trials = {name: tried(lab, backbone, passes, name == TRIALS).on(there.keys) for name in (TRIALS, FREE_TRIALS)}
    for name, made in trials.items():
        row = {"placement": name, "passes": passes, **accuracy_row(made.right)}
        rows.append(row | (difference(trials[TRIALS].right, made.right) if name == FREE_TRIALS else {}))
    return rows


def tried(lab: Lab, backbone: Backbone, passes: int, on_grid: bool) -> Predictions:
    """The model's predictions at the final positions of a trial search."""
    model, tokens = backbone.at(lab.sparse), lab.sparse
    about = lab.about(backbone, lab.candidate(backbone, Setting("isotropic", tokens)), oracle=True)

    def compute() -> dict[str, Tensor]:
        names: list[str] = []
        right = []
        for batch in loader(lab.sources.images(model, oracle=True), lab.settings.batch_size, lab.settings.workers):
            images, labels = (each.to(lab.state.device) for each in (batch.images, batch.labels))
            start = model.place(images, tokens=tokens, prior="isotropic")
            how: Row = {"passes": passes, "on_grid": on_grid, "keys": batch.keys}
            made = trial_search(model, images, labels, start, model.grid_size, **how)
            right.append((made.logits[:, -1].argmax(-1) == labels).cpu())
            names += batch.keys
        return {"keys": encode_names(names), "right": torch.cat(right)}

    made = lab.remember({**about, "kind": "trials", "passes": passes, "on_grid": on_grid}, compute)
    return Predictions(decode_names(made["keys"]), made["right"])


def distance(first: Tensor, second: Tensor, size: tuple[int, int]) -> float:
    """The mean distance between positions, in pixels."""
    return ((first - second)[..., :2] * first.new_tensor(size)).norm(dim=-1).mean().item()


TABLE: Table = {
    "backbone": "backbone", "tokens": "tokens", "placement": "placement",
    "steps × lr": lambda row: f"{row['steps']} × {row['lr']:g}" if "lr" in row else "",
    "moved, px": number("moved", ".1f"),
    "top-1 %": cell, "gain over grid": signed, "p": number("p", ".2g"), "images": "images",
}  # fmt: skip


def bars(result: Result) -> list[Row]:
    """The shorter search of ours and of the paper's, with a bar for each way of moving its positions."""
    return [row for row in [*result.rows, *result.paper] if row.get("steps", 5) == PRESETS["paper"].steps]


STUDY = Study(
    "off-grid", "tab:off_grid_vs_grid",
    "Is the grid a limitation: how much accuracy do searched positions lose on the grid, and how much after any move?",
    run,
    figure(
        grouped_bars, bars, group="backbone", bar="placement", value="top1",
        label="top-1 accuracy, %", title="Searched positions (5 steps at 0.003), moved to the grid and in other ways",
    ),
    TABLE,
)  # fmt: skip
