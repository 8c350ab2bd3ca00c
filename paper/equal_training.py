"""Distil one ViT with several inputs and equal training: python -m paper.equal_training WEIGHTS TRAIN VAL [--merged].

All variants have the same teacher, images, crops, losses, learning rates and steps; only the student's input differs.
This separates the gain from placed windows from the gain from training. Runs that are finished in --runs are skipped;
interrupted ones resume. Writes docs/results/imagenet/equal-training.*.

With --merged: windows and a smaller image are measured as trained, and with more tokens of which similar ones are
merged at the same multiply-adds. Merging itself is not trained. Writes docs/results/imagenet/equal-merging.*.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import spot
from paper.backbone import shrinkable
from paper.program import SET_ASIDE, program
from paper.statistics import accuracy_row, difference
from paper.study import page, signed
from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.draws import Draw, generator
from spot.evaluation.accuracy import Setting, evaluate, model_of, with_models
from spot.evaluation.cost import macs
from spot.hashes import hash_file
from spot.models.baselines import Resize, shrink_to_grid, small_grid, tome_at_cost
from spot.models.family import Source, at_budget, dense_model
from spot.models.spot_vit import SpotViT
from spot.models.tome import Merging, ToMe
from spot.models.tome_schedule import MERGED, four_blocks, merge_share, windows_and_blocks_macs
from spot.options import TrainOptions
from spot.placement.sizes import Scale, sized, tiling_scale
from spot.store import read_state, write_json, write_state, write_text
from spot.tokens.position_embedding import grid_positions
from spot.training.batches import MicroBatch
from spot.training.objectives import Distil, DistilOutput
from spot.training.recipes import find_recipe, override, parse_assignments
from spot.training.run import run as start

OUT = Path(__file__).parents[1] / "docs" / "results" / "imagenet"
NAME, BUDGETS = "vit_tiny_patch16_224.augreg_in21k_ft_in1k", (25, 49, 100)
STEPS: Sequence[str] = ("epochs=1", "ema=0.985", "precision=bf16")  # of distil-sizes
SQUARES = "budgets=((25,),(49,),(100,),(196,))"
ALL = ("budgets=((195,),)", "shares=(1.0,)", "weights=(1.0,)", "priors=('uniform',)")
FIRST, SMALLER = "windows, sizes", "a smaller image"
MAX_SHARE = 0.9  # the largest share of a smaller image's patches to merge: not every number of patches is possible


# The students' inputs


class Resized(Distil):
    """The student's input is the grid of a smaller image; budgets are square numbers."""

    def place(self, images: Tensor, number: int, batch: MicroBatch) -> Tensor:
        tokens, _ = self.budget(number, batch)
        if tokens >= self.model.grid(images).shape[1]:
            return self.model.grid(images)
        tiling = tiling_scale(tokens, images.shape[-2], images.shape[-1], self.model.patch_size)
        return sized(Resize(self.model, tokens).place(images), tiling)

    def student(self, images: Tensor, positions: Tensor, share: float, tokens: int) -> DistilOutput:
        small = shrink_to_grid(images, positions.shape[1], self.model.patch_size)
        return super().student(small, positions[..., :2], share, tokens)


class Dropped(Distil):
    """The student's input is a random subset of the grid's patches."""

    def place(self, images: Tensor, number: int, batch: MicroBatch) -> Tensor:
        grid, (tokens, _) = self.model.grid(images), self.budget(number, batch)
        draw = generator(self.recipe.seed, Draw.PLACE, batch.step, number)
        order = batch.select(torch.rand(batch.batch_size, grid.shape[1], generator=draw)).argsort(1)
        return grid.gather(1, order[:, :tokens, None].expand(-1, -1, 2).to(grid.device))


class Merged(Distil):
    """The student merges all patches with ToMe at the budget's cost. The feature-map loss skips merged tokens."""

    def place(self, images: Tensor, number: int, batch: MicroBatch) -> Tensor:
        return self.model.grid(images)

    def student(self, images: Tensor, positions: Tensor, share: float, tokens: int) -> DistilOutput:
        tome = tome_at_cost(self.model, tokens)
        merged = tome.merge(images)
        logits, pooled = (tome.forward_head(merged.features, each, merged.sizes) for each in (False, True))
        return DistilOutput(logits, pooled, [])


class Variant(NamedTuple):
    """How a student is trained and measured: changes to the recipe, the objective, and its input."""

    changes: tuple[str, ...] = ("scale_std=none",)
    objective: type[Distil] = Distil
    baseline: str = ""  # the model's input, by name in BASELINES; by default isotropic windows
    scale: Scale = 1.0  # of these windows


VARIANTS = {
    FIRST: Variant((), scale="auto"),
    "windows, sizes, another seed": Variant(("seed=1",), scale="auto"),
    "windows of scale 1": Variant(),
    SMALLER: Variant(("scale_std=none", SQUARES), Resized, "resize"),
    "random patches of the grid": Variant(objective=Dropped, baseline="patch-dropout"),
    "all patches, merged (ToMe)": Variant(objective=Merged, baseline="tome-cost"),
    "195 windows anywhere, never few": Variant(("scale_std=none", *ALL)),
}


# Merging after the training


class SmallerMerged(ToMe):
    """A smaller image with more patches than its budget, merged at the budget's multiply-adds."""

    def __init__(self, source: Source, tokens: int) -> None:
        count, schedule = schedule_for_smaller_image(dense_model(source), tokens)
        super().__init__(at_budget(source, count), schedule, own_placement=True)
        self.places = grid_positions(small_grid(count, *self.model.img_size))

    def place(self, images: Tensor, **_: Any) -> Tensor:
        """The centres of the smaller image's patches (B, N, 2)."""
        return self.places.to(images.device).expand(len(images), -1, -1)

    def merge(self, images: Tensor, positions: Any = None, **_: Any) -> Any:
        return super().merge(shrink_to_grid(images, len(self.places), self.model.patch_size), self.place(images))


def schedule_for_smaller_image(model: SpotViT, tokens: int) -> tuple[int, list[int]]:
    """The largest patch count of a smaller image that costs no more than `tokens` if merged, and the schedule."""
    depth, budget = len(model.vit.blocks), windows_and_blocks_macs(model, tokens)
    cells = len(model.grid())
    for count in (cells, *reversed(shrinkable(model, range(tokens + 1, cells)))):
        for percent in range(round(100 * MERGED), round(100 * MAX_SHARE) + 1):
            schedule = merge_share(percent / 100, four_blocks(depth), count, depth)
            if windows_and_blocks_macs(model, count, schedule) <= budget:
                return count, schedule
    return tokens, [0] * depth


# The program

Measured = dict[tuple[int, bool], tuple[Setting, Tensor]]  # by budget and merging: what was measured, right (M,)


def main(weights: Path, train: Path, val: Path, runs: Path = Path("runs/equal"), merged: bool = False) -> None:
    """Train and measure the variants without a result in RUNS, and write the table.

    Args:
        weights: a folder with timm's files.
        train: unlabelled photographs; those in tools/set_aside.txt are left out.
        val: labelled images, which are read once for each row.
        runs: folder of the training runs.
        merged: measure windows and a smaller image with and without merging, instead of all variants.
    """
    base = weights / f"{NAME}.safetensors"
    names = (FIRST, SMALLER) if merged else tuple(VARIANTS)
    found = {name: measured(name, base, train, val, runs, merged) for name in names}
    rows = merged_rows(found) if merged else trained_rows(found)
    settings: dict[str, Any] = {"model": NAME, "recipe": ["distil-sizes", *STEPS]}
    settings["images"] = len(found[FIRST][BUDGETS[0], False][1])
    settings["models"] = {NAME: {"source": NAME, "weights": hash_file(base)}}
    name, text = ("equal-merging", MERGED_PAGE) if merged else ("equal-training", PAGE)
    report.show(rows, f"{name}: top-1, %")
    write_json(OUT / f"{name}.json", {"rows": rows, "settings": settings})
    write_text(OUT / f"{name}.md", page(text.format(changes=", ".join(STEPS), **settings), report.markdown(rows)))


def measured(variant: str, base: Path, train: Path, val: Path, runs: Path, merged: bool) -> Measured:
    """A variant's outcomes, by budget and whether tokens are merged; it is trained first if necessary."""
    changes, objective, baseline, scale = VARIANTS[variant]
    run = runs / variant.replace(",", "").replace(" ", "-")
    if not (run / "model" / "model.safetensors").is_file():
        where = TrainOptions(data=str(train), out=run, leave_out=SET_ASIDE)
        recipe = override(find_recipe("distil-sizes"), parse_assignments([*STEPS, *changes], "FIELD=VALUE"))
        start(spot.load(base.stem, weights=base), recipe, where, objective=objective)
    model = spot.load(run / "model")
    settings = {}
    for tokens in BUDGETS:
        settings[tokens, False] = Setting(baseline or "isotropic", tokens, scale=None if baseline else scale)
        if merged:
            even = model.at(prior="isotropic", scale="auto")
            merging = Merging(even, tokens, "isotropic") if variant == FIRST else SmallerMerged(model, tokens)
            settings[tokens, True] = Setting(model=merging)
    settings = dict(zip(settings, with_models(model, list(settings.values())), strict=True))
    file = run / ("merged.pt" if merged else "trained.pt")
    if not file.is_file():
        result = evaluate(model, loader(data_for(model, str(val))), list(settings.values()))
        write_state(file, {"right": [ranks == 0 for ranks in result.ranks]})
    right = read_state(file)["right"]
    return {line: (setting, each) for (line, setting), each in zip(settings.items(), right, strict=True)}


def trained_rows(found: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """A row for each variant: its accuracies and their differences from the first variant's, with intervals."""
    rows = []
    for variant, own in found.items():
        cells: dict[str, Any] = {"what the student is shown": variant}
        for line, (_, right) in own.items():
            cells[f"{line[0]} tokens"] = accuracy_row(right)["top1"]
            if variant != FIRST:
                cells[f"against the first, {line[0]}"] = signed(difference(found[FIRST][line][1], right))
        rows.append(cells)
    return rows


def merged_rows(found: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """A row for each budget and treatment: the gain from merging, and the difference to windows treated alike."""
    rows = []
    for tokens, merged, variant in product(BUDGETS, (False, True), found):
        setting, right = found[variant][tokens, merged]
        windows = found[FIRST][tokens, merged][1]
        model: Any = model_of(setting)
        blocks = enumerate(model.schedule() if merged else ())
        rows.append(
            {
                "at the cost of": tokens,
                "what is shown": f"{variant}, merged" if merged else variant,
                "tokens at first": model.starting_tokens if merged else tokens,
                "merged in blocks": ", ".join(f"{number}: {count}" for number, count in blocks if count) or "–",
                "GMACs": f"{macs(model) / 1e9:.3f}",
                "top-1": f"{accuracy_row(right)['top1']:.1f}",
                "gain of merging": signed(difference(found[variant][tokens, False][1], right)) if merged else "–",
                "smaller image − windows": "–" if variant == FIRST else signed(difference(windows, right)),
            }
        )
    return rows


PAGE = """# Equal training

Written by `python -m paper.equal_training`. Every row is {model}, trained with {recipe[0]} ({changes}): the same
teacher, images, views, losses, rates and number of steps. Rows differ only in the student's input. Each is measured
with the input it was trained on, at the same multiply-adds (for ToMe where merging can reach them), on {images} images
that were not used to choose anything. Differences are paired, with 95 % intervals."""
MERGED_PAGE = """# Equal training, then merging

Written by `python -m paper.equal_training --merged`. Every row is {model}, trained with {recipe[0]} ({changes}): the
same teacher, images, views, losses, rates and number of steps for windows and for a smaller image. Each is measured
with the input it was trained on, and with more tokens, of which similar ones are merged, at the same multiply-adds.
*merged in blocks* is the number of merged tokens by block, counted from 0. Merging was not trained. The {images} images
were not used to choose anything. Differences are paired, with 95 % intervals."""


if __name__ == "__main__":
    program("paper.equal_training", main, __doc__)
