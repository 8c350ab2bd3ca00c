"""Merged windows against a merged smaller image: python -m paper.equal_merging WEIGHTS TRAIN VAL [RUNS].

The control of `merged`: a smaller image with more patches than its budget, merged at the same multiply-adds. Both
models are distilled in the same way, as in paper.equal_training, in RUNS (by default runs/equal, shared with that
study). Each is measured as trained, and merged at the same multiply-adds. Merging itself is not trained. Writes
docs/results/imagenet/equal-merging.*.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import spot
from paper.equal_training import BUDGETS, FIRST, OUT, STEPS, WAYS, trained
from paper.statistics import difference, share
from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate
from spot.evaluation.cost import macs
from spot.hashes import hash_file
from spot.models.family import Source, at_budget, dense_model
from spot.models.merging import MERGED, Merging, price
from spot.models.resize import Resize, shrunk, small_grid
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.tome_schedule import in_few_blocks
from spot.models.wrappers import TokenModel
from spot.store import read_state, whole, write_json, write_state
from spot.tokens.position_embedding import grid_positions
from tools.make_retrofits import NAMES
from tools.program import program

SMALLER = "a smaller image"
MOST = 0.9  # the largest share of a smaller image's patches to merge: not every number of patches is possible


class SmallerMerged(ToMe):
    """A smaller image with more patches than its budget, merged at the budget's multiply-adds."""

    def __init__(self, source: Source, tokens: int) -> None:
        count, schedule = affordable(dense_model(source), tokens)
        super().__init__(at_budget(source, count), r=schedule, own_placement=True)
        self.places = grid_positions(small_grid(count, *self.model.img_size))

    def place(self, images: Tensor, **_: Any) -> Tensor:
        """The centres of the smaller image's patches (B, N, 2)."""
        return self.places.to(images.device).expand(len(images), -1, -1)

    def _encoded(self, images: Tensor, positions: Any, **placing: Any) -> Any:
        return super()._encoded(shrunk(images, len(self.places), self.model.patch_size), self.place(images))


def affordable(model: SpotViT, tokens: int) -> tuple[int, list[int]]:
    """The largest patch count of a smaller image that costs no more than `tokens` if merged, and the schedule."""
    depth, budget = len(model.vit.blocks), price(model, tokens, [0] * len(model.vit.blocks))
    for count in range(len(model.grid()), tokens, -1):
        try:
            small_grid(count, *model.img_size)
        except InputError:
            continue  # the aspect would change too much
        for percent in range(round(100 * MERGED), round(100 * MOST) + 1):
            schedule = in_few_blocks(percent / 100, count, depth)
            if price(model, count, schedule) <= budget:
                return count, schedule
    return tokens, [0] * depth


def main(
    weights: Path,
    train: Path,
    val: Path,
    runs: Path,
    *,
    out: Path = OUT,
    name: str = NAMES[0],
    budgets: Sequence[int] = BUDGETS,
    options: Sequence[str] = STEPS,
) -> None:
    """Train and measure what is missing in RUNS; `options` are recipe fields of both models."""
    base = weights / f"{name}.safetensors"
    right: dict[tuple[str, int, bool], Tensor] = {}
    made: dict[tuple[str, int, bool], TokenModel] = {}
    for way in (FIRST, SMALLER):
        changes, objective, _ = WAYS[way]
        run = trained(way, changes, objective, base, train, runs, options)
        model = spot.load(run / "model")
        models = {(way, tokens, merged): each for (tokens, merged), each in lines(model, way, budgets).items()}
        file = run / "merged.pt"
        if not file.is_file():
            images = loader(data_for(model, str(val)))
            result = evaluate(model, images, [Setting(model=each) for each in models.values()])
            write_state(file, {"right": [ranks == 0 for ranks in result.ranks]})
        made |= models
        right |= dict(zip(models, read_state(file)["right"], strict=True))
    rows = [row(way, tokens, merged, made, right) for tokens in budgets for way, merged in ORDER]
    report.show(rows, "Top-1, %, after equal training, without and with merging")
    about: dict[str, Any] = {"model": name, "recipe": ["distil-sizes", *options]}
    about["images"] = len(next(iter(right.values())))
    about["models"] = {name: {"source": name, "weights": hash_file(base)}}
    write_json(out / "equal-merging.json", {"rows": rows, "settings": about})
    with whole(out / "equal-merging.md") as temporary:
        temporary.write_text(PAGE.format(table=report.markdown(rows), changes=", ".join(about["recipe"][1:]), **about))


ORDER = [(way, merged) for merged in (False, True) for way in (FIRST, SMALLER)]


def lines(model: spot.SpotViT, way: str, budgets: Sequence[int]) -> dict[tuple[int, bool], TokenModel]:
    """The measured models, by budget and whether they merge."""
    made: dict[tuple[int, bool], TokenModel] = {}
    for tokens in budgets:
        if way == SMALLER:
            made[tokens, False], made[tokens, True] = Resize(model, tokens), SmallerMerged(model, tokens)
        else:
            even = model.at(prior="isotropic", scale="auto")
            made[tokens, False], made[tokens, True] = even.at(tokens=tokens), Merging(even, tokens, "isotropic")
    return made


def row(
    way: str,
    tokens: int,
    merged: bool,
    made: Mapping[tuple[str, int, bool], TokenModel],
    right: Mapping[tuple[str, int, bool], Tensor],
) -> dict[str, Any]:
    """A row: accuracy, the gain from merging, and the difference to windows with the same treatment."""
    model, ours = made[way, tokens, merged], right[way, tokens, merged]
    return {
        "at the cost of": tokens,
        "what is shown": f"{way}, merged" if merged else way,
        "tokens at first": getattr(model, "starting_tokens", tokens),
        "merged in blocks": schedule(model) if merged else "–",
        "GMACs": f"{macs(model) / 1e9:.3f}",
        "top-1": f"{share(ours)['top1']:.1f}",
        "gain of merging": signed(right[way, tokens, False], ours) if merged else "–",
        "smaller image − windows": signed(right[FIRST, tokens, merged], ours) if way == SMALLER else "–",
    }


def schedule(model: Any) -> str:
    """The number of tokens merged away by block, counted from 0."""
    return ", ".join(f"{number}: {count}" for number, count in enumerate(model.schedule()) if count)


def signed(first: Tensor, second: Tensor) -> str:
    """The second's accuracy minus the first's, in points, with its interval."""
    apart = difference(first, second)
    return f"{apart['delta']:+.1f} ({apart['delta_low']:+.1f} to {apart['delta_high']:+.1f})"


PAGE = """# Equal training, then merging

Written by `python -m paper.equal_merging`. Every row is {model}, trained with {recipe[0]} ({changes}): the same
teacher, images, views, losses, rates and number of steps for windows and for a smaller image. Each is measured with
the input it was trained on, and with more tokens, of which similar ones are merged, at the same multiply-adds. *merged
in blocks* is the number of merged tokens by block, counted from 0. Merging was not trained. The {images} images were
not used to choose anything. Differences are paired, with 95 % intervals.

{table}"""


if __name__ == "__main__":
    program("equal merging", __doc__, main, needed=3, runs="runs/equal")
