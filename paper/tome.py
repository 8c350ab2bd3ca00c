"""SPoT against token merging (ToMe): speed, accuracy and multiply-adds, measured in one run.

The paper compares its own speed-up, 3.31×, with the one that ToMe's authors published, 1.95×. These have
different code, GPUs and runs, and each is relative to its own dense model. Here both run in turns on one
device, relative to one dense ViT. Each SPoT budget is compared with ToMe at the same multiply-adds, if ToMe
can reach them: with the published schedule and a better one, with plain and with retrofitted weights. It is
also compared with a smaller image of as many patches, and with ToMe at its published speed-up.
"""

from paper.backbone import Backbone, shrinkable, vit_b16_macs
from paper.lab import Lab
from paper.statistics import accuracy_row, difference
from paper.study import Result, Row, Study, Table, cell, figure, paper_row, signed
from paper.timing import COLUMNS, timed, timing_method, timing_note
from spot.errors import InputError
from spot.evaluation.accuracy import Setting
from spot.models.baselines import TOME_FLOOR
from spot.models.spot_vit import SpotViT
from spot.models.tome_schedule import blocks_macs, schedule_for_macs
from spot.plots.accuracy import accuracy

VIT, SPOT, MERGED, FLOORED, SMALLER = "ViT", "SPoT", "ToMe", "ToMe, best schedule", "smaller image"
SAME = ", SPoT's weights"  # suffix of a method's name
MERGING = {MERGED: "tome-cost", FLOORED: "tome-floor"}
MOST = "half in every block"  # the maximum of ToMe
PUBLISHED = 1.95  # ToMe's speed-up in the paper's table
NEAR = 0.06  # costs that differ by a smaller share count as equal

# Backbone, method, setting, speed-up, change in accuracy.
PAPER = (
    ("CLS-IN21k", MERGED, "as published", 1.95, -4.20),
    ("CLS-IN21k", SPOT, "100 tokens", 3.31, -2.95),
    ("MAE-IN1k", MERGED, "as published", 1.94, -4.87),
    ("MAE-IN1k", "ToMe, fine-tuned so", "as published", 1.95, -1.71),
    ("MAE-IN1k", SPOT, "100 tokens", 3.31, -1.13),
)


def run(lab: Lab) -> Result:
    """Dense, SPoT at every budget, ToMe at the same cost and at the published speed-up."""
    rows: list[Row] = []
    notes: list[str] = []
    for backbone in lab.backbones:
        cells = len(backbone.model.grid())
        budgets = [tokens for tokens in lab.tokens if tokens < cells]
        if not budgets:
            raise InputError(f"tome compares budgets below the grid's {cells} tokens, got {lab.tokens}")
        rows += compared(lab, backbone, budgets, notes)
    notes = [
        lab.conditions(searched=False),
        timing_note(lab),
        "Speed-up and MAC ratio are relative to the dense ViT, the drop to the method's own dense accuracy on the same "
        "images. The paper's SPoT is relative to SPoT's own dense model, its ToMe rows are ToMe's published figures: "
        "another run on another GPU.",
        f"The paper's 3.31× at 100 tokens stands against {paper_mac_ratio():.2f}× fewer multiply-adds (ViT-B/16, "
        "counted): arithmetic alone does not explain it.",
        f"SPoT minus it: at the same multiply-adds in the blocks (to {100 * NEAR:.0f} %), on the same images; p "
        "is McNemar's, exact. ToMe begins with all tokens and merges at most half of them in a block, so the cost of "
        "few tokens is out of its reach.",
        f"{MERGED} merges as many tokens in every block, as published. {FLOORED}: below a third of the grid it keeps "
        f"the same share in every block until {TOME_FLOOR:g} of the budget is left, above it is the same; chosen on "
        f"images set aside from training. Rows with{SAME.removeprefix(',')} merge, or shrink the image, with the "
        "retrofitted weights; none were trained to.",
        *dict.fromkeys(notes),
    ]
    return Result(rows, paper_rows(), notes, {"timing": timing_method(lab)})


def paper_rows() -> list[Row]:
    return [
        paper_row(backbone, method=method, setting=setting, delta=change, **{"speed-up": speed})
        for backbone, method, setting, speed, change in PAPER
    ]


def compared(lab: Lab, backbone: Backbone, budgets: list[int], notes: list[str]) -> list[Row]:
    """The rows of one backbone."""
    cells, weights = len(backbone.model.grid()), [""]
    if backbone.parent is None:
        notes.append(f"The plain ViT of {backbone.name} is not there: its ToMe merges tokens of SPoT's weights.")
    elif backbone.parent_hash != backbone.hash:
        weights.append(SAME)
    # The setting of each line, by method and requested cost.
    lines = {(VIT, "dense"): Setting("plain", cells), (SPOT, "dense"): Setting("isotropic", cells)}
    lines |= {(SPOT, f"{tokens} tokens"): Setting("isotropic", tokens) for tokens in budgets}
    plain = backbone.parent or backbone.model
    macs = blocks_macs(plain, cells) / PUBLISHED
    schedule = schedule_for_macs(plain, macs)
    if blocks_macs(plain, cells, schedule) <= macs:
        lines[MERGED, f"{PUBLISHED}× by MACs"] = Setting("tome", cells - sum(schedule))
    else:
        notes.append(f"ToMe cannot be {PUBLISHED} times faster with the few blocks of {backbone.name}.")
    reached, most = matched(plain, budgets)
    rivals = {(method, tokens): name for method, name in MERGING.items() for tokens in reached}
    rivals |= {(SMALLER, tokens): "resize" for tokens in shrinkable(backbone.model, budgets)}
    for suffix in weights:
        for (method, tokens), name in rivals.items():
            lines[method + suffix, f"as {tokens} tokens"] = Setting(name, tokens)
    if most is not None:
        lines[MERGED, MOST] = Setting("tome-cost", most)
    settings = {
        line: lab.same_weights(backbone, each) if line[0].endswith(SAME) else each for line, each in lines.items()
    }
    right = {line: predictions.right for line, predictions in lab.accuracy(backbone, settings).items()}
    # The speed does not depend on the weights, so each method is timed once.
    models = {" ".join(line): lab.model(backbone, each) for line, each in lines.items() if not line[0].endswith(SAME)}
    speeds = timed(lab, models)
    rows = []
    for (method, what), setting in lines.items():
        spot = method == SPOT or method.endswith(SAME) or backbone.parent is None
        dense, here = right[SPOT if spot else VIT, "dense"], right[method, what]
        row: Row = {"backbone": backbone.name, "method": method, "setting": what, "tokens": setting.tokens}
        row |= speeds[f"{method.removesuffix(SAME)} {what}"] | accuracy_row(here) | difference(dense, here)
        if what.startswith("as "):
            row |= difference(here, right[SPOT, what.removeprefix("as ")], "versus")
        rows.append(row)
    return rows


def matched(model: SpotViT, budgets: list[int]) -> tuple[list[int], int | None]:
    """The budgets whose cost ToMe can reach, and a budget that gives its maximum merging, if that differs."""
    cells = len(model.grid())
    wanted = {tokens: blocks_macs(model, tokens) for tokens in budgets}  # ToMe embeds all patches in any case
    schedules = {tokens: schedule_for_macs(model, macs) for tokens, macs in wanted.items()}
    reached = [
        tokens for tokens in budgets if blocks_macs(model, cells, schedules[tokens]) <= (1 + NEAR) * wanted[tokens]
    ]
    most = min(budgets)
    return reached, None if schedules[most] in [schedules[tokens] for tokens in reached] else most


def paper_mac_ratio() -> float:
    """The ratio of ViT-B/16's multiply-adds with 196 tokens to those with 100, by torch's counter."""
    return vit_b16_macs(196) / vit_b16_macs(100)


def versus(row: Row) -> str:
    return f"{signed(row, 'versus')}, p = {row['versus_p']:.2g}" if "versus" in row else ""


TABLE: Table = {
    "backbone": "backbone", "method": "method", "setting": "setting", **COLUMNS, "top-1 %": cell, "change": signed,
    "SPoT minus it": versus, "images": "images",
}  # fmt: skip


def points(result: Result) -> list[Row]:
    return [row for row in [*result.rows, *result.paper] if row["method"] != VIT]


STUDY = Study(
    "tome", "tab:tome",
    "How much faster, and how much less accurate, are SPoT and ToMe than the dense model, in one run?",
    run,
    figure(
        accuracy, points, line="method", across="speed-up", value="delta", panel="backbone", log=False,
        across_label="speed-up over the dense ViT", label="change in top-1, percentage points",
        title="Speed and accuracy of SPoT and ToMe",
    ),
    TABLE,
)  # fmt: skip
