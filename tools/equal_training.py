"""Distil one ViT in several ways for as many steps: python -m tools.equal_training WEIGHTS TRAIN VAL [RUNS].

Every way has the same teacher, images, views, losses, rates and steps; only what the student is shown differs. So the
gain of placed windows is told from the gain of training. WEIGHTS holds timm's files, TRAIN unlabelled photographs of
which those in tools/set_aside.txt are left out, VAL images that are read once for each row. What is done in RUNS
(runs/equal by default) is skipped, what was interrupted goes on. Writes docs/results/imagenet/equal-training.*.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import spot
from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.evaluation.accuracy import Setting, evaluate
from spot.store import read_state, whole, write_json, write_state
from spot.studies.statistics import difference, share
from tools.make_assets import call
from tools.make_retrofits import NAMES, SET_ASIDE
from tools.program import program

OUT = Path(__file__).parents[1] / "docs" / "results" / "imagenet"
BUDGETS = (25, 49, 100)
STEPS = ("epochs=1", "ema=0.985", "precision=bf16")  # of distil-sizes
SQUARES = "budgets=((25,),(49,),(100,),(196,))"
ALL = ("budgets=((195,),)", "shares=(1.0,)", "weights=(1.0,)", "priors=('uniform',)")
FIRST = "windows, sizes"

# What is changed in the recipe, and what the result is measured with (the scale of its windows, or a baseline).
WAYS: dict[str, tuple[tuple[str, ...], str]] = {
    FIRST: ((), "auto"),
    "windows, sizes, another seed": (("seed=1",), "auto"),
    "windows of scale 1": (("sizes=none",), "1"),
    "a smaller image": (("sizes=none", "view=resize", SQUARES), "resize"),
    "random patches of the grid": (("sizes=none", "view=dropout"), "patch-dropout"),
    "all patches, merged (ToMe)": (("sizes=none", "view=tome"), "tome-cost"),
    "195 windows anywhere, never few": (("sizes=none", *ALL), "1"),
}


def main(
    weights: Path,
    train: Path,
    val: Path,
    runs: Path,
    *,
    out: Path = OUT,
    name: str = NAMES[0],
    ways: Mapping[str, tuple[tuple[str, ...], str]] = WAYS,
    budgets: Sequence[int] = BUDGETS,
    options: Sequence[str] = STEPS,
) -> None:
    """Train and measure what is not there yet; `options` are recipe fields of all ways."""
    base = weights / f"{name}.safetensors"
    right: dict[str, dict[str, torch.Tensor]] = {}
    for way, (changes, measured) in ways.items():
        run = runs / way.replace(",", "").replace(" ", "-")
        if not (run / "model" / "model.safetensors").is_file():
            where = ["--data", train, "--leave-out", SET_ASIDE, "--cache", runs / "cache", "--out", run]
            recipe = ["--recipe", "distil-sizes", "--set", *options, *changes]
            call("retrofit", name, "--weights", base, *where, *recipe)
        file = run / "right.pt"
        if not file.is_file():
            write_state(file, outcomes(spot.load(run / "model"), measured, val, budgets))
        right[way] = read_state(file)
    rows = [row(way, right[way], right[next(iter(ways))]) for way in ways]
    report.show(rows, "Top-1, %, after equal training")
    about = {"model": name, "recipe": ["distil-sizes", *options], "images": len(next(iter(right[FIRST].values())))}
    write_json(out / "equal-training.json", {"rows": rows, "settings": about})
    with whole(out / "equal-training.md") as temporary:
        temporary.write_text(PAGE.format(table=report.markdown(rows), **about))


def outcomes(model: spot.SpotViT, measured: str, val: Path, budgets: Sequence[int]) -> dict[str, torch.Tensor]:
    """Whether the model is right about each image, by budget, with what it was taught."""
    if measured[0].isalpha() and measured != "auto":
        settings = [Setting(measured, tokens) for tokens in budgets]
    else:
        settings = [Setting("isotropic", tokens, scale=measured if measured == "auto" else 1.0) for tokens in budgets]
    result = evaluate(model, loader(data_for(model, str(val))), settings)
    return {str(tokens): ranks == 0 for tokens, ranks in zip(budgets, result.ranks, strict=True)}


def row(way: str, ours: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A way's accuracies and how much less they are than the first way's, with intervals."""
    cells: dict[str, Any] = {"what the student is shown": way}
    for tokens, right in ours.items():
        cells[f"{tokens} tokens"] = share(right)["top1"]
        if right is not first[tokens]:
            apart = difference(first[tokens], right)
            ends = f"{apart['delta_low']:+.1f} to {apart['delta_high']:+.1f}"
            cells[f"against the first, {tokens}"] = f"{apart['delta']:+.1f} ({ends})"
    return cells


PAGE = """# Equal training

Made by `python -m tools.equal_training`; nothing here is typed by hand. {model}, {recipe}: the same teacher, images,
views, losses, rates and number of steps for every row; only what the student is shown differs. Each is measured as it
was taught, at the same multiply-adds (for ToMe where merging can reach them), on {images} images that nothing was
chosen on. Differences are paired, with 95 % intervals.

{table}"""


if __name__ == "__main__":
    program("equal training", __doc__, main, needed=3, runs="runs/equal")
