"""Accuracy against speed, and the cost of reading windows (the paper's fig:comp_vs_acc, tab:throughput, appendix C).

Compared are a ViT on some of its patches or on a smaller image, SPoT, and an oracle as the upper bound. Throughput is
relative to the dense ViT in the same run. The oracle is plotted at the speed of a forward pass at its positions, as in
the paper: its search is not timed. SPoT's rows also have the cost of reading windows: FLOPs by the paper's formula,
T · K² · (7C + 8) for T windows, FLOPs of the operators that run, and the share of the time. All samples of a window
share one fractional offset, so here a window is two one-dimensional interpolations.

`timed` interleaves the timing of models in the same way for every study. On a CPU it measures the processor time of
one thread, which is stable on a busy machine; on other devices wall time. Times are never cached, because both
times of a ratio must come from the same run.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paper.backbone import shrinkable, vit_b16
from paper.lab import Lab
from paper.plots import trade_off
from paper.statistics import difference, predicted, share
from paper.study import Result, Row, Study, Table, cell, figure, paper_row, signed, with_counts
from paper.timing import measure, median_interval, pictures, tokenizer_share
from spot.evaluation.accuracy import Setting
from spot.evaluation.cost import flops, image_shape
from spot.evaluation.throughput import Clock, cpu_threads, interleaved
from spot.models.wrappers import TokenModel
from spot.tokens.windows import windows

ROUNDS = 11
BATCH = {"cpu": 32}  # images per batch; other devices need larger batches to be busy
OTHERWISE = 256

VIT, SPOT, ORACLE = "ViT, patch dropout", "SPoT", "SPoT-ON (oracle)"
SMALL, SAME_SMALL = "ViT, smaller image", "smaller image, SPoT's weights"

# Tokens (this table of the paper has 50 instead of 49) → thousands of images per second of ViT and of SPoT.
SPEED = {25: (34.81, 34.78), 50: (20.41, 20.39), 100: (10.77, 10.75), 196: (3.29, 3.25)}
# The paper's figure at these budgets; its SPoT is the best of all backbones and priors.
ACCURACY = {
    ("CLS-IN21k", VIT): (24.72, 56.29, 78.75, 85.11),
    ("CLS-IN1k", VIT): (9.24, 41.05, 71.22, 79.14),
    ("MAE-IN1k", VIT): (55.43, 70.69, 79.53, 83.60),
    ("best", SPOT): (62.83, 76.84, 82.76, 85.15),
    ("best", ORACLE): (90.93, 94.87, 96.09, 96.24),
}
WEAKER = ("paper: CLS-IN21k", "paper: CLS-IN1k")


def run(lab: Lab) -> Result:
    """Five lines over the budgets; all but the oracle timed in turns."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        cells = len(backbone.model.grid())
        budgets = [n for n in lab.tokens if n <= cells]
        few = shrinkable(backbone.model, budgets)
        settings = {(VIT, n): Setting("patch-dropout", n) for n in budgets}
        settings |= {(SMALL, n): Setting("resize", n) for n in few}
        settings |= {(SPOT, n): Setting("isotropic", n) for n in budgets}
        made = lab.accuracies(backbone, {line: [setting] for line, setting in settings.items()})
        once = {(VIT, cells): Setting("plain", cells)}  # with all patches PatchDropout is the plain ViT
        once |= {line: setting for line, setting in settings.items() if line not in once}
        models = {f"{method} {n}": lab.model(backbone, setting) for (method, n), setting in once.items()}
        speeds = timed(lab, models)
        if backbone.parent is not None and backbone.parent_hash != backbone.hash:  # same speed as with plain weights
            made |= lab.accuracies(backbone.by_itself(), {(SAME_SMALL, n): [Setting("resize", n)] for n in few})
            speeds |= {f"{SAME_SMALL} {n}": speeds[f"{SMALL} {n}"] for n in few}
        patches = alone(lab, partial(embedding_share, lab.model(backbone, Setting("plain"))))
        right = {line: predictions.right for line, (predictions,) in made.items()}
        for n in budgets:
            about: Row = {"backbone": backbone.name, "tokens": n}
            for method in (VIT, SMALL, SAME_SMALL, SPOT):
                if (method, n) in right:
                    row = {**about, "method": method, **speeds[f"{method} {n}"], **share(right[method, n])}
                    if method == SPOT:
                        model = lab.model(backbone, settings[SPOT, n]).eval()
                        row |= {"patches": patches, **counted(model), **alone(lab, partial(reading, model))}
                    else:
                        row |= difference(right[SPOT, n], right[method, n])
                    rows.append(row)
            placements = lab.oracle(backbone, tokens=n)
            start, end = predicted(placements, 0), predicted(placements)
            row = {**about, "method": ORACLE, **speeds[f"{SPOT} {n}"], **share(end.right)}
            rows.append(row | difference(start.right, end.right))
    notes = [
        lab.differs(),
        how(lab),
        "The difference is the line minus SPoT, on the same images. The oracle knows the label, and its search is not "
        "timed: it shows what better placing could give.",
        "Patches of a part of the grid are cut by SPoT's own windows, so ViT and SPoT differ in speed by what placing "
        "costs; with all tokens the ViT is timm's own. SPoT has isotropic tokens; the paper's is the best of all "
        "backbones and priors.",
        "Reading windows, FLOPs of one image: by the paper's formula and as operators run them, with their share of "
        "the model's FLOPs by torch's counter, which leaves element-wise work out.",
        "Reading, % of time: the share of a forward pass that windows alone take; tokenizing adds placing, projection "
        "and position embedding; patches is the plain ViT's share for its convolution. The paper's share is what "
        "SPoT's throughput lacks of the ViT's, on a GPU.",
        "smaller image: the image shrunk until its own grid has as many patches, with the plain and the retrofitted "
        "weights.",
    ]
    absent = [backbone.name for backbone in lab.backbones if backbone.parent is None]
    if absent:
        notes.append(f"The plain ViT is not there for {', '.join(absent)}: SPoT's weights get the patches instead.")
    return Result(rows, paper_rows(), notes, about_timing(lab))


def sampling_flops(tokens: int, size: int = 16, channels: int = 3) -> int:
    """FLOPs to read T windows of K × K bilinear samples: T · K² · (7C + 8) (paper, computational overhead)."""
    return tokens * size**2 * (7 * channels + 8)


def arithmetic(call: Callable[[], Any]) -> int:
    """FLOPs of the element-wise operators that run in a call without gradients.

    One addition, subtraction, multiplication or division of floating-point numbers is one FLOP, a
    linear interpolation three. As in the paper, comparing, rounding, clamping, copying, indexing and
    integer arithmetic are not counted.
    """
    with torch.no_grad(), _Arithmetic() as counter:
        call()
    return counter.flops


EACH = {"add": 1, "sub": 1, "rsub": 1, "mul": 1, "div": 1, "addcmul": 3, "addcdiv": 3, "lerp": 3}  # FLOPs by operator


class _Arithmetic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        each = EACH.get(func.overloadpacket.__name__.rstrip("_"), 0)
        if each and isinstance(result, Tensor) and result.is_floating_point():
            self.flops += each * result.numel()
        return result


def counted(model: TokenModel) -> Row:
    """FLOPs of one image: of the model, and of reading its windows by the formula and by the operators that run."""
    image = pictures(1, image_shape(model), model)
    positions = model.place(image)
    total, formula = flops(model), sampling_flops(model.tokens, model.spot_vit.patch_size, image.shape[1])
    run = arithmetic(lambda: windows(image, positions, model.spot_vit.patch_size))
    shares = {"formula_share": 100 * formula / total, "counted_share": 100 * run / total}
    return {"FLOPs": total, "formula": formula, "counted": run, **shares}


@torch.no_grad()
def reading(model: TokenModel, clock: Clock, batch: int) -> Row:
    """Shares of a forward pass, in percent: reading windows, with its interval, and the whole tokenizer."""
    images = pictures(batch, image_shape(model), model)
    positions = model.place(images)
    calls: dict[str, Callable[[Tensor], Any]] = {"model": model}
    calls["reading"] = lambda given: windows(given, positions, model.spot_vit.patch_size)
    for call in calls.values():
        call(images)
    seconds = interleaved(calls, images, ROUNDS, clock)
    shares = [100 * part / whole for part, whole in zip(seconds["reading"], seconds["model"], strict=True)]
    low, high = median_interval(shares)
    tokenizing = 100 * tokenizer_share(model, images, clock)
    return {"reading": median(shares), "reading_low": low, "reading_high": high, "tokenizing": tokenizing}


@torch.no_grad()
def embedding_share(vit: TokenModel, clock: Clock, batch: int) -> float:
    """The share of a plain ViT's time that its own patch embedding takes, in percent."""
    images = pictures(batch, image_shape(vit), vit)
    vit.eval()(images)
    return 100 * tokenizer_share(vit, images, clock)


def timed(lab: Lab, models: Mapping[str, TokenModel]) -> dict[str, Row]:
    """Speed of each model by name: speed-up over the first model, its interval, MACs, images per second.

    All are measured at a large batch; `single` is the speed-up at batch 1, with its interval.
    """

    def call(clock: Clock, batch: int) -> list[Row]:
        return measure(models, batch_sizes=[1, batch], rounds=ROUNDS, clock=clock, shown=True)

    large = {"speed-up": "speed-up", "speed-up low": "speed_low", "speed-up high": "speed_high"}
    large |= {name: name for name in ("MAC ratio", "GMACs", "images/s", "batch")}
    single = {"speed-up": "single", "speed-up low": "single_low", "speed-up high": "single_high"}
    rows: dict[str, Row] = {}
    for row in alone(lab, call):
        names = single if row["batch"] == 1 else large
        rows.setdefault(row["model"], {}).update({new: row[name] for name, new in names.items()})
    return rows


def alone(lab: Lab, call: Callable[[Clock, int], Any]) -> Any:
    """The result of call(clock, batch) in the first process; the others wait, so that they do not disturb it."""
    result: list[Any] = [None]
    if lab.main:
        given = about_timing(lab)["timing"]
        with cpu_threads(given["threads"]):
            result = [call(given["clock"], given["batch"])]
    if lab.state.num_processes > 1:
        broadcast_object_list(result)
    return result[0]


def about_timing(lab: Lab) -> dict[str, Any]:
    """The timing method, for a result's settings."""
    device = lab.state.device.type
    threads, clock = (1, "processor") if device == "cpu" else (None, "wall")
    batch = BATCH.get(device, OTHERWISE)
    return {"timing": {"device": device, "threads": threads, "clock": clock, "batch": batch, "rounds": ROUNDS}}


def how(lab: Lab) -> str:
    """The same as a sentence."""
    given = about_timing(lab)["timing"]
    clock = "processor time of one thread" if given["clock"] == "processor" else f"the clock, on {given['device']}"
    return (
        f"Speed-ups are medians over {ROUNDS} rounds in turns in one run, batches of {given['batch']} and of 1, by "
        f"{clock}; intervals are 95 % (order statistics). † above the ratio of multiply-adds: it owes that part to the "
        "machine (what fits into its caches), not to the method."
    )


def paper_rows() -> list[Row]:
    """The paper's lines; SPoT rows have the formula (185,600 for 25 tokens in print) relative to ViT-B/16's FLOPs."""
    model = vit_b16()
    rows: list[Row] = []
    for (backbone, method), values in ACCURACY.items():
        for (tokens, speeds), top1 in zip(SPEED.items(), values, strict=True):
            speed = speeds[method != VIT]
            row = {"images/s": 1000 * speed, "speed-up": speed / SPEED[196][0]}
            if method == SPOT:
                total, formula = flops(model, tokens=tokens), sampling_flops(tokens)
                row |= {"FLOPs": total, "formula": formula, "formula_share": 100 * formula / total}
                row |= {"reading": 100 * (1 - speeds[1] / speeds[0])}
            rows.append(paper_row(backbone, tokens=tokens, method=method, top1=top1, **row))
    return rows


def shown(row: Row) -> str:
    """A speed-up for tables, with its batch, and † if it exceeds the MAC ratio: 3.31×† (3.20–3.40) at 32."""
    interval = f" ({row['speed_low']:.2f}–{row['speed_high']:.2f})" if "speed_low" in row else ""
    above = "†" if row["speed-up"] > row.get("MAC ratio", row["speed-up"]) else ""
    return f"{row['speed-up']:.2f}×{above}{interval}" + (f" at {row['batch']}" if "batch" in row else "")


def shown_single(row: Row) -> str:
    """The same for batch 1."""
    return f"{row['single']:.2f}× ({row['single_low']:.2f}–{row['single_high']:.2f})" if "single" in row else ""


def shown_macs(row: Row) -> str:
    return f"{row['MAC ratio']:.2f}×" if "MAC ratio" in row else ""


def flops_of(row: Row, name: str) -> str:
    return f"{row[name]:,} ({row[name + '_share']:.2g} %)" if name in row else ""


TABLE: Table = {
    "backbone": "backbone", "method": "method", "tokens": "tokens", "images/s": lambda row: f"{row['images/s']:,.0f}",
    "speed-up": shown, "batch 1": shown_single, "by MACs": shown_macs, "top-1 %": cell,
    "minus SPoT": signed, "images": "images", "reading, FLOPs by formula": lambda row: flops_of(row, "formula"),
    "as run": lambda row: flops_of(row, "counted"),
    "reading, % of time": lambda row: cell(row, "reading", "reading_low", "reading_high") if "reading" in row else "",
    "tokenizing, %": "tokenizing", "patches, %": "patches",
}  # fmt: skip


def points(result: Result) -> list[Row]:
    # The paper's ViT is the most robust of its three, MAE-IN1k; the table has all of them.
    drawn = [row for row in with_counts(result, "method") if row["method"] != VIT or row["backbone"] not in WEAKER]
    return [{**row, "backbone": "paper: ViT-B/16"} if "paper" in row["backbone"] else row for row in drawn]


STUDY = Study(
    "speed", "fig:comp_vs_acc, tab:throughput, appendix C",
    "Which accuracy is reached at which speed, what could an oracle reach, and what does reading windows cost?",
    run,
    figure(
        trade_off, points, oracle=ORACLE, reached=SPOT, panel="backbone",
        across_label="throughput, relative to the dense ViT", title="Accuracy against throughput",
    ),
    TABLE,
)  # fmt: skip
