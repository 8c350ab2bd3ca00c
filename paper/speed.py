"""Accuracy against speed (the paper's fig:comp_vs_acc and tab:throughput).

Compared are a ViT on some of its patches or on a smaller image, SPoT, and an oracle as the upper bound. Throughput is
relative to the dense ViT in the same run. The oracle is plotted at the speed of a forward pass at its positions, as in
the paper: its search is not timed. SPoT's rows also have the FLOPs of reading windows by the paper's formula
(appendix C); `python -m benchmarks overhead` measures the time.
"""

from paper import classification
from paper.backbone import shrinkable, vit_b16
from paper.lab import Lab
from paper.statistics import accuracy_row, difference, predicted
from paper.study import Result, Row, Study, Table, cell, figure, number, paper_row, signed, with_counts
from paper.timing import COLUMNS, timed, timing_method, timing_note
from spot.evaluation.accuracy import Setting
from spot.evaluation.cost import flops
from spot.plots.accuracy import accuracy

VIT, SPOT, ORACLE = classification.DROPOUT, "SPoT", "SPoT-ON (oracle)"
SMALL, SAME_SMALL = classification.SMALLER, classification.SAME_SMALLER

# Tokens (this table of the paper has 50 instead of 49) → thousands of images per second of ViT and of SPoT.
SPEED = {25: (34.81, 34.78), 50: (20.41, 20.39), 100: (10.77, 10.75), 196: (3.29, 3.25)}
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
        once = {(VIT, cells): Setting("plain", cells)}  # with all patches PatchDropout is the plain ViT
        once |= {line: setting for line, setting in settings.items() if line not in once}
        speeds = timed(lab, {f"{method} {n}": lab.model(backbone, setting) for (method, n), setting in once.items()})
        if backbone.parent is not None and backbone.parent_hash != backbone.hash:  # same speed as with plain weights
            settings |= {(SAME_SMALL, n): lab.same_weights(backbone, settings[SMALL, n]) for n in few}
            speeds |= {f"{SAME_SMALL} {n}": speeds[f"{SMALL} {n}"] for n in few}
        right = {line: predictions.right for line, predictions in lab.accuracy(backbone, settings).items()}
        for n in budgets:
            about: Row = {"backbone": backbone.name, "tokens": n}
            for method in (VIT, SMALL, SAME_SMALL, SPOT):
                if (method, n) in right:
                    row = {**about, "method": method, **speeds[f"{method} {n}"], **accuracy_row(right[method, n])}
                    if method == SPOT:
                        model = lab.model(backbone, settings[SPOT, n])
                        row |= reading(n, flops(model), model.spot_vit.patch_size)
                    else:
                        row |= difference(right[SPOT, n], right[method, n])
                    rows.append(row)
            placements = lab.oracle(backbone, tokens=n)
            start, end = predicted(placements, 0), predicted(placements)
            row = {**about, "method": ORACLE, **speeds[f"{SPOT} {n}"], **accuracy_row(end.right)}
            rows.append(row | difference(start.right, end.right))
    notes = [
        lab.conditions(),
        timing_note(lab),
        "The difference is the line minus SPoT, on the same images. The oracle knows the label, and its search is not "
        "timed: it shows what better placing could give.",
        "Patches of a part of the grid are cut by SPoT's own windows, so ViT and SPoT differ in speed by what placing "
        "costs; with all tokens the ViT is timm's own. SPoT has isotropic tokens; the paper's is the best of all "
        "backbones and priors.",
        "Reading windows, FLOPs of one image: by the paper's formula, with the share of the model's FLOPs by torch's "
        "counter, which leaves element-wise work out.",
        "smaller image: the image shrunk until its own grid has as many patches, with the plain and the retrofitted "
        "weights.",
    ]
    absent = [backbone.name for backbone in lab.backbones if backbone.parent is None]
    if absent:
        notes.append(f"The plain ViT is not there for {', '.join(absent)}: SPoT's weights get the patches instead.")
    return Result(rows, paper_rows(), notes, {"timing": timing_method(lab)})


def reading(tokens: int, total: int, size: int = 16) -> Row:
    """FLOPs to read T windows of K × K bilinear samples of 3 channels, T · K² · (7 · 3 + 8), and their share in percent
    of the model's (paper, computational overhead)."""
    formula = tokens * size**2 * (7 * 3 + 8)
    return {"FLOPs": total, "formula": formula, "formula_share": 100 * formula / total}


def paper_accuracies() -> dict[tuple[str, str], list[float]]:
    """The paper's figure has accuracies of its table tab:imgcls: those of each plain ViT, and the best of all backbones
    and priors without a saliency map, as they are and searched."""
    lines = {
        (backbone, line): [top1 for top1, _ in values]
        for backbone, own in classification.PAPER.items()
        for line, values in own.items()
    }
    placed = [values for (_, line), values in lines.items() if line not in (VIT, classification.ORACLE, "salient")]
    searched = [values for (_, line), values in lines.items() if line == classification.ORACLE]
    best = {("best", SPOT): placed, ("best", ORACLE): searched}
    return {line: values for line, values in lines.items() if line[1] == VIT} | {
        method: [max(column) for column in zip(*own, strict=True)] for method, own in best.items()
    }


def paper_rows() -> list[Row]:
    """The paper's lines; SPoT rows have the formula (185,600 for 25 tokens in print) relative to ViT-B/16's FLOPs."""
    rows: list[Row] = []
    for (backbone, method), values in paper_accuracies().items():
        for (tokens, speeds), top1 in zip(SPEED.items(), values, strict=True):
            speed = speeds[method != VIT]
            row = {"images/s": 1000 * speed, "speed-up": speed / SPEED[196][0]}
            row |= reading(tokens, flops(vit_b16(), tokens=tokens)) if method == SPOT else {}
            rows.append(paper_row(backbone, tokens=tokens, method=method, top1=top1, **row))
    return rows


TABLE: Table = {
    "backbone": "backbone", "method": "method", "tokens": "tokens", "images/s": number("images/s", ",.0f"),
    **COLUMNS, "top-1 %": cell, "minus SPoT": signed, "images": "images",
    "reading, FLOPs": lambda row: f"{row['formula']:,} ({row['formula_share']:.2g} %)" if "formula" in row else "",
}  # fmt: skip


def points(result: Result) -> list[Row]:
    # The paper's ViT is the most robust of its three, MAE-IN1k; the table has all of them.
    drawn = [row for row in with_counts(result, "method") if row["method"] != VIT or row["backbone"] not in WEAKER]
    return [{**row, "backbone": "paper: ViT-B/16"} if "paper" in row["backbone"] else row for row in drawn]


STUDY = Study(
    "speed", "fig:comp_vs_acc, tab:throughput, appendix C",
    "Which accuracy is reached at which speed, and what could an oracle reach?",
    run,
    figure(
        accuracy, points, line="method", across="speed-up", panel="backbone", log=False, numbers=(SPOT, "tokens"),
        across_label="throughput, relative to the dense ViT", title="Accuracy against throughput",
    ),
    TABLE,
)  # fmt: skip
