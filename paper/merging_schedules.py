"""Which blocks should merge tokens? `python -m paper.merging_schedules WEIGHTS TRAIN OUT.md`

Each schedule of `Merging` is run on the images set aside (tools/set_aside.txt) and their mirror images, at the
multiply-adds of 25 and 49 tokens, with both shipped retrofits. The table has the KL divergence from the dense ViT,
which varies less than accuracy on few images, and the top-1 accuracy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import spot
from paper.program import divergence, images_set_aside, program, shipped_retrofits
from paper.provenance import comment
from paper.study import page
from spot import report
from spot.data.loader import loader
from spot.models.family import at_budget, dense_model
from spot.models.shipped import ALIASES
from spot.models.tome import ToMe
from spot.models.tome_schedule import merge_share, windows_and_blocks_macs
from spot.store import write_text

BUDGETS = (25, 49)
SCHEDULES: tuple[tuple[tuple[int, ...], float], ...] = (  # the blocks that merge, and the share of tokens merged away
    (tuple(range(3, 12)), 0.8),
    ((3, 4, 6, 8), 0.7),
    ((3, 5, 7, 9), 0.8),
    ((3, 4, 6, 8, 10), 0.75),
    ((3, 4, 5, 6, 7, 8), 0.75),
    ((3, 4, 5, 6, 8, 10), 0.8),
)


def merging(family: spot.Family, tokens: int, blocks: Sequence[int], share: float) -> ToMe:
    """The model with the most windows whose multiply-adds under this schedule do not exceed those of `tokens`."""
    dense = dense_model(family)
    depth = len(dense.vit.blocks)
    budget = windows_and_blocks_macs(dense, tokens)
    for count in range(len(dense.grid()), tokens - 1, -1):
        schedule = merge_share(share, blocks, count, depth)
        if windows_and_blocks_macs(dense, count, schedule) <= budget:
            return ToMe(at_budget(family, count, prior="isotropic"), schedule, own_placement=True).eval()
    raise ValueError(f"no number of windows costs as little as {tokens} tokens with blocks {blocks}")


def main(weights: Path, train: Path, out: Path) -> None:
    """Measure every schedule with both retrofits and write the table."""
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for alias, family in shipped_retrofits(weights):
        dense = dense_model(family)
        data = loader(images_set_aside(dense, train), 25)
        batches = [(torch.cat([images, images.flip(-1)]), labels.repeat(2)) for images, labels, _ in data]
        labels = torch.cat([each for _, each in batches])
        with torch.inference_mode():
            full = torch.cat([dense.vit(images).log_softmax(1) for images, _ in batches])
            runs = [(blocks, share, tokens) for blocks, share in SCHEDULES for tokens in BUDGETS]
            for blocks, share, tokens in report.track(runs, alias, len(runs)):
                model = merging(family, tokens, blocks, share)
                made = torch.cat([model(images).log_softmax(1) for images, _ in batches])
                row = table.setdefault((blocks, share), {"blocks that merge": words(blocks), "share merged": share})
                row[f"{alias}, {tokens}: KL"] = round(divergence(full, made).mean().item(), 3)
                row[f"{alias}, {tokens}: top-1 %"] = round(100 * (made.argmax(1) == labels).float().mean().item(), 1)
    rows = list(table.values())
    for row in rows:
        for value in ("KL", "top-1 %"):
            cells = [number for name, number in row.items() if name.endswith(value)]
            row[f"mean {value}"] = round(sum(cells) / len(cells), 3)
    report.show(rows, "Merging schedules")
    about = f"{len(labels)} images: those set aside, and their mirror images. "
    about += "Written by `python -m paper.merging_schedules`."
    write_text(out, page(about, comment({alias: alias for alias in ALIASES}), report.markdown(rows)))


def words(blocks: Sequence[int]) -> str:
    """The numbers of blocks, counted from 0, as text."""
    consecutive = len(blocks) == blocks[-1] - blocks[0] + 1
    return f"{blocks[0]} to {blocks[-1]}" if consecutive else ", ".join(map(str, blocks))


if __name__ == "__main__":
    program("paper.merging_schedules", main, __doc__)
