"""Accuracy against throughput: a ViT on a part of its patches or on a smaller image, SPoT, and an oracle's ceiling.

Throughput is relative to the dense ViT in the same run. The oracle's accuracy stands at the speed of
a forward pass at its positions, as in the paper: the search that finds them is not counted.
"""

from spot.evaluation.accuracy import Setting
from spot.models.resize import shrinkable
from spot.studies import timing
from spot.studies.lab import Lab
from spot.studies.statistics import difference, predicted, share
from spot.studies.study import Result, Row, Study, Table, cell, figure, paper_row, signed, with_counts

VIT, SPOT, ORACLE = "ViT, patch dropout", "SPoT", "SPoT-ON (oracle)"
SMALL, SAME_SMALL = "ViT, smaller image", "smaller image, SPoT's weights"

# Tokens (the paper's table has 50 where its others have 49) → thousands of images a second of ViT and of SPoT.
SPEED = {25: (34.81, 34.78), 50: (20.41, 20.39), 100: (10.77, 10.75), 196: (3.29, 3.25)}
# What the figure draws at these budgets; its SPoT is the best of all backbones and priors.
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
        timed = {(VIT, cells): Setting("plain", cells)}  # with all its patches a ViT drops none
        timed |= {line: setting for line, setting in settings.items() if line not in timed}
        models = {f"{method} {n}": lab.model(backbone, setting) for (method, n), setting in timed.items()}
        speeds = timing.timed(lab, models)
        if backbone.parent is not None and backbone.parent_hash != backbone.hash:  # as fast as with the plain weights
            made |= lab.accuracies(backbone.by_itself(), {(SAME_SMALL, n): [Setting("resize", n)] for n in few})
            speeds |= {f"{SAME_SMALL} {n}": speeds[f"{SMALL} {n}"] for n in few}
        right = {line: predictions.right for line, (predictions,) in made.items()}
        for n in budgets:
            about: Row = {"backbone": backbone.name, "tokens": n}
            for method in (VIT, SMALL, SAME_SMALL, SPOT):
                if (method, n) in right:
                    row = {**about, "method": method, **speeds[f"{method} {n}"], **share(right[method, n])}
                    rows.append(row | ({} if method == SPOT else difference(right[SPOT, n], right[method, n])))
            placements = lab.oracle(backbone, tokens=n)
            start, end = predicted(placements, 0), predicted(placements)
            row = {**about, "method": ORACLE, **speeds[f"{SPOT} {n}"], **share(end.right)}
            rows.append(row | difference(start.right, end.right))
    notes = [
        lab.differs(),
        timing.how(lab),
        "The difference is the line minus SPoT, on the same images. The oracle knows the label, and its search is not "
        "timed: it shows what better placing could give.",
        "Patches of a part of the grid are cut by SPoT's own windows, so ViT and SPoT differ in speed by what placing "
        "costs; with all tokens the ViT is timm's own. What reading costs is in the study overhead. SPoT has isotropic "
        "tokens; the paper's is the best of all backbones and priors.",
        "smaller image: the image shrunk until its own grid has as many patches, with the plain and the retrofitted "
        "weights.",
    ]
    absent = [backbone.name for backbone in lab.backbones if backbone.parent is None]
    if absent:
        notes.append(f"The plain ViT is not there for {', '.join(absent)}: SPoT's weights get the patches instead.")
    return Result(rows, paper_rows(), notes, timing.about(lab))


def paper_rows() -> list[Row]:
    rows: list[Row] = []
    for (backbone, method), values in ACCURACY.items():
        for (tokens, speeds), top1 in zip(SPEED.items(), values, strict=True):
            speed = speeds[method != VIT]
            fast = {"images/s": 1000 * speed, "speed-up": speed / SPEED[196][0]}
            rows.append(paper_row(backbone, tokens=tokens, method=method, top1=top1, **fast))
    return rows


TABLE: Table = {
    "backbone": "backbone", "method": "method", "tokens": "tokens", "images/s": lambda row: f"{row['images/s']:,.0f}",
    "speed-up": timing.shown, "batch 1": timing.shown_single, "by MACs": timing.shown_macs, "top-1 %": cell,
    "minus SPoT": signed, "images": "images",
}  # fmt: skip


def points(result: Result) -> list[Row]:
    # The paper's ViT is the most robust of its three, MAE-IN1k; the table has them all.
    drawn = [row for row in with_counts(result, "method") if row["method"] != VIT or row["backbone"] not in WEAKER]
    return [{**row, "backbone": "paper: ViT-B/16"} if "paper" in row["backbone"] else row for row in drawn]


STUDY = Study(
    "throughput", "fig:comp_vs_acc, tab:throughput",
    "What accuracy is there at which speed, and how far is it to what an oracle reaches?",
    run,
    figure(
        "accuracy.trade_off", points, oracle=ORACLE, reached=SPOT, panel="backbone",
        across_label="throughput, relative to the dense ViT", title="Accuracy against throughput",
    ),
    TABLE,
)  # fmt: skip
