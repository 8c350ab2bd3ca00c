"""What merging adds to windows, and whether it adds as much to a smaller image (ours; docs/baselines.md).

`merged` places more windows than a budget pays for and merges similar ones in later blocks. A smaller image can be
treated alike: less small, with its patches merged at the same multiply-adds. All four have the weights of one retrofit.
"""

from typing import Any

from torch import Tensor

from paper.backbone import Backbone
from paper.lab import Lab
from paper.plots import grouped_bars
from paper.statistics import difference, over_seeds
from paper.study import Result, Row, Study, Table, cell, figure, signed
from spot.errors import InputError
from spot.evaluation.accuracy import Setting
from spot.evaluation.cost import macs
from spot.models.family import Source, at_budget, dense_model
from spot.models.merging import MERGED, price
from spot.models.resize import shrunk, small_grid
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.tome_schedule import in_few_blocks
from spot.tokens.position_embedding import grid_positions

WINDOWS, SMALLER = "isotropic windows", "smaller image"
LINES = (WINDOWS, f"{WINDOWS}, merged", SMALLER, f"{SMALLER}, merged")
MOST = 0.9  # of a smaller image's patches may be merged away: it cannot have any number of them


class SmallerMerged(ToMe):
    """A smaller image with more patches than its budget, merged at the budget's multiply-adds."""

    def __init__(self, source: Source, tokens: int) -> None:
        count, schedule = affordable(dense_model(source), tokens)
        super().__init__(at_budget(source, count), r=schedule, own_placement=True)
        self.places = grid_positions(small_grid(count, *self.model.img_size))

    def place(self, images: Tensor, **_: Any) -> Tensor:
        """The centres of the smaller image's patches (B, N, 2)."""
        return self.places.to(images.device).expand(len(images), -1, -1)

    def _encoded(self, images: Tensor, positions: Tensor | None, **placing: Any) -> Any:
        return super()._encoded(shrunk(images, len(self.places), self.model.patch_size), self.place(images))


def affordable(model: SpotViT, tokens: int) -> tuple[int, list[int]]:
    """The most patches of a smaller image whose merging costs no more than `tokens` do, and how they are merged."""
    depth, budget = len(model.vit.blocks), price(model, tokens, [0] * len(model.vit.blocks))
    for count in range(len(model.grid()), tokens, -1):
        try:
            small_grid(count, *model.img_size)
        except InputError:
            continue  # its rows and columns would be too different
        for percent in range(round(100 * MERGED), round(100 * MOST) + 1):
            schedule = in_few_blocks(percent / 100, count, depth)
            if price(model, count, schedule) <= budget:
                return count, schedule
    return tokens, [0] * depth


def run(lab: Lab) -> Result:
    """Four lines at every budget below the grid."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        for tokens in (n for n in lab.tokens if n < len(backbone.model.grid())):
            made = settings(backbone, tokens)
            predicted = dict(zip(made, lab.candidates(backbone, [*made.values()]), strict=True))
            right = {line: own.right for line, own in predicted.items()}
            for line, setting in made.items():
                row: Row = {
                    "backbone": backbone.name,
                    "tokens": tokens,
                    "placement": line,
                    **over_seeds([predicted[line]]),
                }
                row |= {"GMACs": macs(setting.bound) / 1e9, "placed": placed(setting)}
                if line.startswith(SMALLER):
                    row |= difference(right[line.replace(SMALLER, WINDOWS)], right[line])
                if line.endswith("merged"):
                    row |= difference(right[line.removesuffix(", merged")], right[line], "gain")
                rows.append(row)
    notes = [
        lab.differs(searched=False).partition(" The paper's")[0] + " The paper has no such table.",
        "placed is how many tokens enter the first block; every row of a budget costs no more than so many tokens "
        "throughout. gain is what merging adds; Δ is a smaller image minus windows that are treated alike.",
        "All lines have the weights of the retrofit, which was trained with windows of several sizes and not with "
        "smaller images. `python -m paper.equal_merging` trains both alike; it was not run to its end yet.",
    ]
    return Result(rows, [], notes)


def settings(backbone: Backbone, tokens: int) -> dict[str, Setting]:
    """By line: what is measured."""
    source = backbone.loaded
    names = dict(zip(LINES[:3], ("isotropic", "merged", "resize"), strict=True))
    made = {line: Setting(name, tokens).of(source) for line, name in names.items()}
    return made | {LINES[3]: Setting(name=LINES[3], model=SmallerMerged(source, tokens))}


def placed(setting: Setting) -> int:
    model = setting.bound
    return model.starting_tokens if isinstance(model, ToMe) else setting.budget


TABLE: Table = {
    "backbone": "backbone", "at the cost of": "tokens", "placement": "placement", "placed": "placed", "GMACs": "GMACs",
    "top-1": cell, "gain of merging": lambda row: signed(row, "gain"), "smaller image − windows": signed,
}  # fmt: skip

STUDY = Study(
    "merging", "ours",
    "What does merging add to windows, and does it add as much to a smaller image?",
    run,
    figure(
        grouped_bars, lambda result: [{**row, "budget": f"{row['tokens']} tokens"} for row in result.rows],
        group="budget", bar="placement", panel="backbone", value="top1", label="top-1 accuracy, %",
        title="At the cost of so many tokens throughout",
    ),
    TABLE,
)  # fmt: skip
