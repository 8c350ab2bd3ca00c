"""Accuracy against throughput: a ViT on a part of its patches, SPoT, and the ceiling that an oracle reaches.

Throughput is relative to the dense ViT in the same run. The oracle's accuracy stands at the speed of
a forward pass at its positions, as in the paper: the search that finds them is not counted.
"""

from spot.evaluation.accuracy import Setting
from spot.studies import timing
from spot.studies.lab import Lab
from spot.studies.predictions import predicted
from spot.studies.statistics import difference, share
from spot.studies.study import PAPER_IMAGES, Figure, Result, Row, Study, Table, cell, signed

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


def run(lab: Lab) -> Result:
    """Three lines over the budgets; ViT and SPoT timed in turns."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        cells = len(backbone.model.grid())
        budgets = [tokens for tokens in lab.tokens if tokens <= cells]
        dense = Setting("plain", cells)
        settings = [dense, *(Setting("patch-dropout", tokens) for tokens in budgets)]
        settings += [Setting(prior, tokens) for tokens in budgets for prior in PRIORS]
        predictions = lab.accuracy(backbone, settings)
        made = {(each.label, each.tokens): own for each, own in zip(settings, predictions, strict=True)}
        best = {tokens: max(PRIORS, key=lambda prior: int(made[prior, tokens].right.sum())) for tokens in budgets}
        timed = {"dense": lab.model(backbone, dense)}
        for tokens in budgets:
            timed[f"{VIT} {tokens}"] = lab.model(backbone, Setting("patch-dropout", tokens))
            timed[f"{SPOT} {tokens}"] = lab.model(backbone, Setting(best[tokens], tokens))
        times = timing.timed(lab, timed)
        for tokens in budgets:
            about: Row = {"backbone": backbone.name, "tokens": tokens}
            plain = "dense" if tokens == cells else f"{VIT} {tokens}"  # with all its patches a ViT drops none
            grid, placed = made["patch-dropout", tokens], made[best[tokens], tokens]
            searched = predicted(lab.oracle(backbone, tokens=tokens))
            rows.append({**about, "method": VIT, **timing.speed(times[plain]), **share(grid.right)})
            fast = timing.speed(times[f"{SPOT} {tokens}"])
            row = {**about, "method": SPOT, "prior": best[tokens], **fast, **share(placed.right)}
            rows.append({**row, **difference(grid.right, placed.right)})
            row = {**about, "method": ORACLE, "prior": "isotropic", **fast, **share(searched.right)}
            gap = difference(placed.on(searched.keys).right, searched.right)
            rows.append({**row, **gap})
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
            row: Row = {"backbone": f"paper: {backbone}", "tokens": tokens, "method": method, "top1": top1}
            rows.append({**row, "images/s": 1000 * speed, "speed-up": speed / SPEED[196][0], "images": PAPER_IMAGES})
    return rows


TABLE: Table = {
    "backbone": "backbone", "method": "method", "prior": lambda row: row.get("prior", ""), "tokens": "tokens",
    "images/s": lambda row: f"{row['images/s']:,.0f}", "speed-up": timing.shown, "by MACs": timing.shown_macs,
    "top-1 %": cell, "change": lambda row: signed(row) if "delta" in row else "", "images": "images",
}  # fmt: skip


def draw(result: Result) -> Figure:
    from spot.plots.trade_off import trade_off

    # The paper's ViT is the most robust of its three, MAE-IN1k; the table has them all.
    drawn = [row for row in result.paper if row["method"] != VIT or "MAE" in row["backbone"]]
    paper = [{**row, "backbone": "paper: ViT-B/16"} for row in drawn]
    return trade_off(
        [*result.rows, *paper], oracle=ORACLE, reached=SPOT, panel="backbone",
        across_label="throughput, relative to the dense ViT", title="Accuracy against throughput",
    )  # fmt: skip


STUDY = Study(
    "throughput", "fig:comp_vs_acc, tab:throughput",
    "What accuracy is there at which speed, and how far is it to what an oracle reaches?",
    run, draw, TABLE,
)  # fmt: skip
