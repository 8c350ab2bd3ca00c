"""Distil one ViT in several ways with equal training: python -m paper.equal_training WEIGHTS TRAIN VAL [RUNS].

All ways have the same teacher, images, crops, losses, learning rates and steps; only the student's input differs.
This separates the gain from placed windows from the gain from training. WEIGHTS holds timm's files, TRAIN unlabelled
photographs (without those in tools/set_aside.txt), VAL images that are read once for each row. Runs that are finished
in RUNS (by default runs/equal) are skipped; interrupted ones resume. Writes docs/results/imagenet/equal-training.*.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import spot
from paper.statistics import difference, share
from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.draws import Draw, generator
from spot.evaluation.accuracy import Setting, evaluate
from spot.hashes import hash_file
from spot.models.resize import Resize, shrunk
from spot.models.tome import ToMe
from spot.options import TrainOptions
from spot.placement.sizes import Scale, sized, tiling_scale
from spot.store import read_state, whole, write_json, write_state
from spot.training.batches import Part
from spot.training.objectives import Distil, Prediction
from spot.training.recipes import find_recipe, override, pairs
from spot.training.run import run as start
from tools.make_retrofits import NAMES, SET_ASIDE
from tools.program import program

OUT = Path(__file__).parents[1] / "docs" / "results" / "imagenet"
BUDGETS = (25, 49, 100)
STEPS = ("epochs=1", "ema=0.985", "precision=bf16")  # of distil-sizes
SQUARES = "budgets=((25,),(49,),(100,),(196,))"
ALL = ("budgets=((195,),)", "shares=(1.0,)", "weights=(1.0,)", "priors=('uniform',)")
FIRST = "windows, sizes"


class Resized(Distil):
    """The student's input is the grid of a smaller image; budgets are square numbers."""

    def place(self, images: Tensor, number: int, part: Part) -> Tensor:
        tokens = self.budget(number, part)
        if tokens >= self.model.grid(images).shape[1]:
            return self.model.grid(images)
        tiling = tiling_scale(tokens, images.shape[-2], images.shape[-1], self.model.patch_size)
        return sized(Resize(self.model, tokens).place(images), tiling)

    def student(self, images: Tensor, positions: Tensor, share: float, tokens: int) -> Prediction:
        small = shrunk(images, positions.shape[1], self.model.patch_size)
        return super().student(small, positions[..., :2], share, tokens)


class Dropped(Distil):
    """The student's input is a random subset of the grid's patches."""

    def place(self, images: Tensor, number: int, part: Part) -> Tensor:
        grid, tokens = self.model.grid(images), self.budget(number, part)
        draw = generator(self.recipe.seed, Draw.PLACE, part.step, number)
        order = part.select(torch.rand(part.batch_size, grid.shape[1], generator=draw)).argsort(1)
        return grid.gather(1, order[:, :tokens, None].expand(-1, -1, 2).to(grid.device))


class Merged(Distil):
    """The student merges all patches with ToMe at the budget's cost. The feature-map loss skips merged tokens."""

    def place(self, images: Tensor, number: int, part: Part) -> Tensor:
        return self.model.grid(images)

    def student(self, images: Tensor, positions: Tensor, share: float, tokens: int) -> Prediction:
        tome = ToMe.matching(self.model, tokens)
        merged = tome.merge(images)
        logits, pooled = (tome.forward_head(merged.features, each, merged.sizes) for each in (False, True))
        return Prediction(logits, pooled, [])


# Changes to the recipe, the objective, and how the result is measured (a scale of windows, or a baseline).
WAYS: dict[str, tuple[tuple[str, ...], type[Distil], str]] = {
    FIRST: ((), Distil, "auto"),
    "windows, sizes, another seed": (("seed=1",), Distil, "auto"),
    "windows of scale 1": (("scale_std=none",), Distil, "1"),
    "a smaller image": (("scale_std=none", SQUARES), Resized, "resize"),
    "random patches of the grid": (("scale_std=none",), Dropped, "patch-dropout"),
    "all patches, merged (ToMe)": (("scale_std=none",), Merged, "tome-cost"),
    "195 windows anywhere, never few": (("scale_std=none", *ALL), Distil, "1"),
}


def main(
    weights: Path,
    train: Path,
    val: Path,
    runs: Path,
    *,
    out: Path = OUT,
    name: str = NAMES[0],
    ways: Mapping[str, tuple[tuple[str, ...], type[Distil], str]] = WAYS,
    budgets: Sequence[int] = BUDGETS,
    options: Sequence[str] = STEPS,
) -> None:
    """Train and measure what is missing in RUNS; `options` are recipe fields of all ways."""
    base = weights / f"{name}.safetensors"
    right: dict[str, dict[str, torch.Tensor]] = {}
    for way, (changes, objective, measured) in ways.items():
        run = trained(way, changes, objective, base, train, runs, options)
        file = run / "right.pt"
        if not file.is_file():
            write_state(file, outcomes(spot.load(run / "model"), measured, val, budgets))
        right[way] = read_state(file)
    rows = [row(way, right[way], right[next(iter(ways))]) for way in ways]
    report.show(rows, "Top-1, %, after equal training")
    about = {"model": name, "recipe": ["distil-sizes", *options], "images": len(next(iter(right[FIRST].values())))}
    about["models"] = {name: {"source": name, "weights": hash_file(base)}}
    write_json(out / "equal-training.json", {"rows": rows, "settings": about})
    with whole(out / "equal-training.md") as temporary:
        temporary.write_text(PAGE.format(table=report.markdown(rows), changes=", ".join(about["recipe"][1:]), **about))


def trained(
    way: str,
    changes: Sequence[str],
    objective: type[Distil],
    base: Path,
    train: Path,
    runs: Path,
    options: Sequence[str],
) -> Path:
    """The folder of a way's run, which is trained first if necessary."""
    run = runs / way.replace(",", "").replace(" ", "-")
    if not (run / "model" / "model.safetensors").is_file():
        where = TrainOptions(data=str(train), out=run, leave_out=SET_ASIDE)
        recipe = override(find_recipe("distil-sizes"), pairs([*options, *changes], "FIELD=VALUE"))
        start(spot.load(base.stem, weights=base), recipe, where, objective=objective)
    return run


def outcomes(model: spot.SpotViT, measured: str, val: Path, budgets: Sequence[int]) -> dict[str, torch.Tensor]:
    """Whether the model is right about each image, by budget, with the inputs it was trained on."""
    if measured[0].isalpha() and measured != "auto":
        settings = [Setting(measured, tokens) for tokens in budgets]
    else:
        scale: Scale = "auto" if measured == "auto" else 1.0
        settings = [Setting("isotropic", tokens, scale=scale) for tokens in budgets]
    result = evaluate(model, loader(data_for(model, str(val))), settings)
    return {str(tokens): ranks == 0 for tokens, ranks in zip(budgets, result.ranks, strict=True)}


def row(way: str, ours: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A way's accuracies and their differences from the first way's, with intervals."""
    cells: dict[str, Any] = {"what the student is shown": way}
    for tokens, right in ours.items():
        cells[f"{tokens} tokens"] = share(right)["top1"]
        if right is not first[tokens]:
            apart = difference(first[tokens], right)
            ends = f"{apart['delta_low']:+.1f} to {apart['delta_high']:+.1f}"
            cells[f"against the first, {tokens}"] = f"{apart['delta']:+.1f} ({ends})"
    return cells


PAGE = """# Equal training

Written by `python -m paper.equal_training`. Every row is {model}, trained with {recipe[0]} ({changes}): the same
teacher, images, views, losses, rates and number of steps. Rows differ only in the student's input. Each is measured
with the input it was trained on, at the same multiply-adds (for ToMe where merging can reach them), on {images} images
that were not used to choose anything. Differences are paired, with 95 % intervals.

{table}"""


if __name__ == "__main__":
    program("equal training", __doc__, main, needed=3, runs="runs/equal")
