"""The control of `needle`, trained on dense grids as long as the sparse model: python -m paper.needle_control MIX DENSE

Both start from the same weights, pretrained on crops, and have the same recipe, images and steps:

    python -m tools.recipes pretrain vit_small_patch16_rope_224 --fresh img_size=192 patch_size=8 embed_dim=128 \\
        depth=6 num_heads=4 init_values=1.0 num_classes=32 --recipe scenes-needle-crops --set precision=no epochs=5 \\
        --data needle:64 --out crops
    python -m tools.recipes retrofit crops/model --recipe scenes-needle --set precision=no epochs=0.78125 \\
        --data needle --out mix
    python -m tools.recipes retrofit crops/model --recipe scenes-needle --set precision=no epochs=0.78125 \\
        'budgets=(576,)' 'object_shares=()' 'priors=("isotropic",)' --data needle --out dense

`mix` has few tokens around the true object in most steps, like the shipped `scenes-needle`. `dense` has
all patches in every step. The shipped policy, which was learned without labels, places the 64 tokens of `mix`. The
shipped model, which was trained for longer, is measured for comparison.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import spot
from paper.needle import SIZES, TOKENS
from paper.program import program
from paper.provenance import file_hashes, sentence
from paper.statistics import accuracy_row, difference
from paper.study import Table, cell, formatted, page, signed
from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.evaluation.accuracy import Setting, evaluate
from spot.evaluation.cost import macs
from spot.hashes import hash_model
from spot.store import write_json, write_text

SHIPPED, MIX, DENSE, GRID = "scenes-needle", "mix, 200 steps", "all dense, 200 steps", "dense grid"


def measured(model: spot.SpotViT, size: int, prior: str, tokens: int, limit: int) -> tuple[Tensor, float]:
    """Whether each of the test scenes of this size is right, and the GMACs of a prediction."""
    scenes = data_for(model, f"needle:{size}", split="test", limit=limit)
    made = evaluate(model, loader(scenes, 16), [Setting(prior, tokens)])
    return made.ranks[0] == 0, macs(model.at(tokens=tokens, prior=prior), (3, size, size)) / 1e9


def main(
    mix: Path,
    dense: Path,
    limit: int = 1024,
    sizes: tuple[int, ...] = SIZES,
    out: Path = Path("docs/results/scenes"),
) -> None:
    """Measure the shipped model and the two controls on scenes that were not used in training.

    Args:
        mix: a model folder: few tokens around the object in most steps.
        dense: a model folder: all patches in every step.
        limit: number of scenes.
        sizes: of the pictures, in pixels.
    """
    torch.set_num_threads(1)
    shipped = spot.load(SHIPPED)
    mixed, densely = spot.load(mix), spot.load(dense)
    mixed.policy = shipped.policy
    rows: list[dict[str, Any]] = []
    for size in sizes:
        cells = (size // shipped.patch_size) ** 2
        lines = {(MIX, "learned"): (mixed, TOKENS), (MIX, GRID): (mixed, cells), (DENSE, GRID): (densely, cells)}
        lines |= {(SHIPPED, "learned"): (shipped, TOKENS), (SHIPPED, GRID): (shipped, cells)}
        first = None
        for (name, placement), (model, tokens) in lines.items():
            right, gmacs = measured(model, size, "learned" if tokens == TOKENS else "isotropic", tokens, limit)
            first = right if first is None else first
            row = {"model": name, "pixels": size, "placement": placement, "tokens": tokens, "gmacs": gmacs}
            rows.append({**row, **accuracy_row(right), **difference(right, first)})
    settings: dict[str, Any] = {"models": {SHIPPED: {"source": SHIPPED, **file_hashes(SHIPPED)}}, "scenes": limit}
    settings["controls"] = {MIX: hash_model(mixed), DENSE: hash_model(densely)}
    write_json(out / "needle-control.json", {"settings": settings, "rows": rows})
    table, notes = formatted(rows, TABLE), [f"{limit:,} test scenes, 95 % intervals, paired differences.", TRAINING]
    write_text(out / "needle-control.md", page(TITLE, QUESTION, report.markdown(table), notes, sentence(settings)))
    report.show(table, "needle, with a dense control")


TITLE, QUESTION = (
    "# needle, with a dense control",
    "Is a policy with 64 tokens better than a ViT that was trained densely?",
)
TRAINING = (
    "mix and all dense start from the same model of crops and have the recipe `scenes-needle` for 200 steps of 32 "
    "scenes of 192 pixels. The shipped model learned longer on crops, and is not to be compared with them."
)
TABLE: Table = {
    "image": lambda row: f"{row['pixels']} × {row['pixels']}", "model": "model", "placement": "placement",
    "tokens": "tokens", "top-1": cell, "first row minus this row": signed,
    "multiply-adds": lambda row: f"{1e3 * row['gmacs']:,.0f} M",
}  # fmt: skip


if __name__ == "__main__":
    program("paper.needle_control", main, __doc__)
