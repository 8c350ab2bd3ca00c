"""Accuracy per epoch while a ViT is retrofitted.

Runs are read from their folders (`--run`). Without any, on scenes, the first built-in grid model is retrofitted for
about a minute. The run is cached, and an interrupted run resumes.
"""

import copy
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paper.lab import Lab
from paper.study import Figure, Result, Row, Study, cell
from spot import __version__
from spot.errors import InputError
from spot.evaluation.accuracy import wilson
from spot.hashes import hash_json
from spot.options import TrainOptions
from spot.plots.training import training_logs
from spot.store import read_json, refuse_no_file
from spot.training.recipes import as_dict, find_recipe, override
from spot.training.run import Validation
from spot.training.run import run as train

RECIPE = "scenes-retrofit"
CHANGES = {"epochs": 6.0, "warmup_epochs": 0.4}  # of SCENES scenes each; the recipe's epochs are longer
SCENES, VALIDATED = 1024, 256

PAPER: list[Row] = [
    {"run": "paper: CLS-IN21k", "epoch": 50}
    | {"says": "fast in the first 5 epochs, level in the last 10; the figure's axis runs from 66 to 86 %"}
]


def run(lab: Lab) -> Result:
    """Read the logs of runs, or do a small run."""
    if lab.settings.runs:
        logs = {name_of(folder, lab.settings.runs): read_log(folder) for folder in lab.settings.runs}
        note = "Runs do not say on how many images they validated, so these curves have no intervals."
    else:
        logs = small_run(lab)
        note = (
            f"A small run of {CHANGES['epochs']:g} epochs of {SCENES:,} scenes, validated on {VALIDATED} others; "
            "epoch 0 is before retrofitting. For a real one: spot retrofit … --out RUN, then --run RUN."
        )
    notes = [
        "The paper's log is not published, so its figure (CLS-IN21k, 50 epochs) is described in words. The paper "
        "validates with a crop of the whole image, which it says gives somewhat lower accuracies than its tables.",
        note,
        *(sentence for name, log in logs.items() for sentence in summary(name, log)),
    ]
    rows = [{"run": name, **row} for name, log in logs.items() for row in log]
    return Result(rows, PAPER, notes, {"runs": list(logs)})


def name_of(folder: Path, others: Sequence[Path]) -> str:
    """A run's name in tables: its folder's name (its path, if another has the same name) and its recipe."""
    file, same = folder / "run.json", [other for other in others if other.name == folder.name]
    name = folder.name if len(same) < 2 else str(folder)
    return f"{name}, {read_json(file)['settings']['recipe']['name']}" if file.is_file() else name


def read_log(folder: Path) -> list[Row]:
    """A run's log: a row per epoch."""
    file = folder / "log.csv"
    refuse_no_file(file, "the log of a training run")
    with file.open(newline="") as lines:
        rows = [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(lines)]
    wanted = {"epoch", "loss", "train_top1", *validations({name: None for row in rows for name in row})}
    kept = [{name: row[name] for name in row if name in wanted} for row in rows if "epoch" in row]
    if not kept:
        raise InputError(f"{file} has no epoch yet; wait for the run's first")
    return kept


def validations(row: Row) -> list[str]:
    """The columns with accuracy on the images set aside: val_ and a number of tokens."""
    return [name for name in row if name[:4] == "val_" and name[4:].isdecimal()]


def small_run(lab: Lab) -> dict[str, list[Row]]:
    """Retrofit the first grid parent on scenes, or resume that run; validation rows have intervals."""
    backbone = next((each for each in lab.backbones if each.parent is not None), None)
    if not lab.settings.scenes or backbone is None:
        raise InputError(
            "accuracy per epoch is read from the log of a run: spot retrofit MODEL … --out RUN, then "
            "python -m paper retrofit --run RUN"
        )
    parent: Any = backbone.parent
    recipe = override(find_recipe(RECIPE), CHANGES)
    mark = hash_json([as_dict(recipe), SCENES, VALIDATED, backbone.parent_hash, __version__])[:12]
    folder = lab.cache.folder / "retrofit" / f"{backbone.name}-{mark}"
    options = TrainOptions(
        data="scenes", out=folder, limit=SCENES, val="scenes", val_limit=VALIDATED, checkpoint_minutes=0.2
    )
    before = Validation(parent, "scenes", VALIDATED)(parent)
    if not (folder / "model").is_dir():
        train(copy.deepcopy(parent), recipe, options)
    log: list[Row] = [{"epoch": 0.0, **before}, *read_log(folder)]
    for row in log:
        for name in validations(row):
            low, high = wilson(row[name] / 100, VALIDATED)
            row |= {f"{name}_low": 100 * low, f"{name}_high": 100 * high}
    return {f"{backbone.name}-grid, {RECIPE}": log}


def summary(name: str, log: list[Row]) -> list[str]:
    """The gain in the first tenth of the epochs and in the last fifth, as the paper reports its own."""
    curves = [key for key in validations(log[-1]) if key in log[0]]
    if not curves or len(log) < 3:
        return []
    sparse = min(curves, key=lambda key: int(key[4:]))
    last = log[-1]["epoch"]
    start, end = log[0][sparse], log[-1][sparse]
    early = next(row for row in log[1:] if row["epoch"] >= last / 10)
    late = min(log[:-1], key=lambda row: abs(row["epoch"] - 0.8 * last))
    return [
        f"{name}, {sparse[4:]} tokens: {start:.1f} % at epoch {log[0]['epoch']:g}, {early[sparse]:.1f} at "
        f"{early['epoch']:g}, {end:.1f} at {last:g}; the last {last - late['epoch']:g} epochs change it by "
        f"{end - late[sparse]:+.1f}."
    ]


def table(result: Result) -> list[Row]:
    lines: list[Row] = []
    for row in result.rows:
        line: Row = {"run": row["run"], "epoch": f"{row['epoch']:g}", "loss": row.get("loss")}
        line["train %"] = row.get("train_top1")
        for name in validations(row):
            line[f"val {name[4:]} tokens, %"] = cell(row, name, f"{name}_low", f"{name}_high")
        lines.append(line)
    return [*lines, *({"run": row["run"], "epoch": f"{row['epoch']}: {row['says']}"} for row in result.paper)]


def draw(result: Result) -> Figure:
    logs: dict[str, list[Row]] = {}
    for row in result.rows:
        logs.setdefault(row["run"], []).append(row)
    return training_logs(logs, "Accuracy while retrofitting")


STUDY = Study(
    "retrofit", "fig:retrofit_abl",
    "How fast does the accuracy grow during retrofitting?",
    run, draw, table,
)  # fmt: skip
