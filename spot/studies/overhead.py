"""What reading windows adds to a ViT: FLOPs by the paper's formula and as they are run, and the share of the time.

The formula counts T · K² · (7C + 8) for T windows. All samples of a window share one fractional
offset, so here a window is two one-dimensional interpolations, with less arithmetic than that.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from spot.evaluation.accuracy import Setting
from spot.evaluation.cost import arithmetic, flops, image_shape, sampling_flops
from spot.evaluation.throughput import Clock, interleaved, median_interval, pictures, tokenizer_share
from spot.models.protocol import TokenModel
from spot.studies import timing
from spot.studies.backbone import vit_b16
from spot.studies.lab import Lab
from spot.studies.study import Result, Row, Study, Table, cell, each_value, figure
from spot.studies.throughput import SPEED
from spot.tokens.windows import windows


def run(lab: Lab) -> Result:
    """Every backbone at every budget."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        patches = timing.alone(lab, partial(embedding_share, lab.model(backbone, Setting("plain"))))
        for tokens in lab.tokens:
            model = lab.model(backbone, Setting("isotropic", tokens)).eval()
            row: Row = {"backbone": backbone.name, "tokens": tokens, "window": model.spot_vit.patch_size}
            row |= counted(model) | timing.alone(lab, partial(measured, model))
            rows.append({**row, "patches": patches})
    notes = [
        "FLOPs are of one image. Formula: T · K² · (7C + 8), the paper's. Counted: additions, multiplications and "
        "interpolations of floating-point numbers as operators run them. Shares are of the model's FLOPs, by torch's "
        "counter, which leaves element-wise work out.",
        f"Reading is the share of a prediction's time that windows alone take, median of {timing.ROUNDS} rounds in "
        "turns; tokenizing adds placing, projection and position embedding. Patches is the same share of the plain "
        "ViT, whose tokenizing is one convolution.",
        "The paper's share of time is what SPoT's throughput lacks of the ViT's in its tab:throughput, on a GPU.",
        "Small models spend a larger share on reading: their blocks are cheap, a window's pixels cost the same.",
    ]
    return Result(rows, paper_rows(), notes, timing.about(lab))


def counted(model: TokenModel) -> Row:
    """FLOPs of one image: of the model, and of reading its windows by formula and as operators run."""
    image = pictures(1, image_shape(model), model)
    positions = model.place(image)
    total, formula = flops(model), sampling_flops(model.tokens, model.spot_vit.patch_size, image.shape[1])
    run = arithmetic(lambda: windows(image, positions, model.spot_vit.patch_size))
    shares = {"formula_share": 100 * formula / total, "counted_share": 100 * run / total}
    return {"FLOPs": total, "formula": formula, "counted": run, **shares}


@torch.no_grad()
def measured(model: TokenModel, clock: Clock, batch: int) -> Row:
    """Shares of a prediction's time, in percent: reading windows, with its interval, and all tokenizing."""
    images = pictures(batch, image_shape(model), model)
    positions = model.place(images)
    size = model.spot_vit.patch_size
    calls: dict[str, Callable[[Tensor], Any]] = {"model": model}
    calls["reading"] = lambda given: windows(given, positions, size)
    for call in calls.values():
        call(images)
    seconds = interleaved(calls, images, timing.ROUNDS, clock)
    shares = [100 * part / whole for part, whole in zip(seconds["reading"], seconds["model"], strict=True)]
    low, high = median_interval(shares)
    tokenizing = 100 * tokenizer_share(model, images, clock)
    return {"reading": median(shares), "low": low, "high": high, "tokenizing": tokenizing}


@torch.no_grad()
def embedding_share(vit: TokenModel, clock: Clock, batch: int) -> float:
    """The share of a plain ViT's time that its own patch embedding takes, in percent."""
    images = pictures(batch, image_shape(vit), vit)
    vit.eval()(images)
    return 100 * tokenizer_share(vit, images, clock)


def paper_rows() -> list[Row]:
    """ViT-B/16 by formula (the paper prints 185,600 for 25 tokens), its FLOPs by torch's counter."""
    model = vit_b16()
    rows = []
    for tokens, (plain, placed) in SPEED.items():
        total, formula = flops(model, tokens=tokens), sampling_flops(tokens)
        row: Row = {"backbone": "paper: ViT-B/16", "tokens": tokens, "window": 16, "FLOPs": total, "formula": formula}
        rows.append({**row, "formula_share": 100 * formula / total, "reading": 100 * (1 - placed / plain)})
    return rows


def flops_of(row: Row, name: str) -> str:
    return f"{row[name]:,} ({row[name + '_share']:.2g} %)" if name in row else ""


TABLE: Table = {
    "backbone": "backbone", "tokens": "tokens", "window": "window", "FLOPs": lambda row: f"{row['FLOPs'] / 1e6:,.1f} M",
    "formula": lambda row: flops_of(row, "formula"), "counted": lambda row: flops_of(row, "counted"),
    "reading, % of time": lambda row: cell(row, "reading"), "tokenizing, %": "tokenizing", "patches, %": "patches",
}  # fmt: skip


SHARES = {
    "FLOPs, the paper's formula": ("formula_share", "", ""),
    "FLOPs, counted": ("counted_share", "", ""),
    "time, measured": ("reading", "low", "high"),
}


def bars(result: Result) -> list[Row]:
    rows = each_value([*result.rows, *result.paper], SHARES)
    return [{**row, "tokens": f"{row['tokens']} tokens"} for row in rows]


STUDY = Study(
    "overhead", "appendix C",
    "What does reading windows add: FLOPs by formula and counted, and its share of the time?",
    run,
    figure(
        "bars.grouped_bars", bars, group="tokens", bar="what", panel="backbone", digits=2, label="% of a prediction",
        title="What reading windows costs",
    ),
    TABLE,
)  # fmt: skip
