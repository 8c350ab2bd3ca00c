"""Accuracy against throughput: a ViT on a part of its patches, SPoT, and the ceiling that an oracle reaches.

Throughput is relative to the dense ViT in the same run. The oracle's accuracy stands at the speed of
a forward pass at its positions, as in the paper: the search that finds them is not counted.
"""

from spot.evaluation.accuracy import Setting
from spot.studies import timing
from spot.studies.lab import Lab
from spot.studies.statistics import difference, predicted, share
from spot.studies.study import Result, Row, Study, Table, cell, figure, paper_row, signed, with_counts

VIT, SPOT, ORACLE = "ViT, patch dropout", "SPoT", "SPoT-ON (oracle)"
PRIORS = ("isotropic", "center")  # SPoT is the better of these at a budget, as in the paper's figure

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
    """Three lines over the budgets; ViT and SPoT timed in turns."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        cells = len(backbone.model.grid())
        budgets = [n for n in lab.tokens if n <= cells]
        names = ("patch-dropout", *PRIORS)
        made = lab.accuracies(backbone, {(name, n): [Setting(name, n)] for n in budgets for name in names})
        best = {n: max(PRIORS, key=lambda prior: int(made[prior, n][0].right.sum())) for n in budgets}
        timed = {f"{VIT} {cells}": Setting("plain", cells)}  # with all its patches a ViT drops none
        for n in budgets:
            timed.setdefault(f"{VIT} {n}", Setting("patch-dropout", n))
            timed[f"{SPOT} {n}"] = Setting(best[n], n)
        speeds = timing.timed(lab, {name: lab.model(backbone, setting) for name, setting in timed.items()})
        for n in budgets:
            (grid,), (placed,) = made["patch-dropout", n], made[best[n], n]
            searched = predicted(lab.oracle(backbone, tokens=n))
            about: Row = {"backbone": backbone.name, "tokens": n}
            rows.append({**about, "method": VIT, **speeds[f"{VIT} {n}"], **share(grid.right)})
            about |= speeds[f"{SPOT} {n}"]
            gain = difference(grid.right, placed.right)
            rows.append({**about, "method": SPOT, "prior": best[n], **share(placed.right), **gain})
            gap = difference(placed.on(searched.keys).right, searched.right)
            rows.append({**about, "method": ORACLE, "prior": "isotropic", **share(searched.right), **gap})
    notes = [
        lab.differs(),
        timing.how(lab),
        "The change is SPoT minus ViT, and for the oracle the gap, oracle minus SPoT, on the same images. The oracle "
        "knows the label, and its search is not timed: it shows what better placing could give.",
        "Patches of a part of the grid are cut by SPoT's own windows, so ViT and SPoT differ in speed by what placing "
        "costs; with all tokens the ViT is timm's own. What reading costs is in the study overhead.",
        f"SPoT is the better of {' and '.join(PRIORS)} at each budget, chosen on these images; the paper's SPoT is "
        "the best of all backbones and priors.",
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
    "backbone": "backbone", "method": "method", "prior": lambda row: row.get("prior", ""), "tokens": "tokens",
    "images/s": lambda row: f"{row['images/s']:,.0f}", "speed-up": timing.shown, "by MACs": timing.shown_macs,
    "top-1 %": cell, "change": lambda row: signed(row) if "delta" in row else "", "images": "images",
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
