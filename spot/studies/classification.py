"""Priors, budgets and backbones: Acc@1 and kNN, with the plain ViT on a part of its grid and the oracle."""

import torch

from spot.evaluation.accuracy import Setting
from spot.studies.lab import Lab
from spot.studies.priors import PRIORS
from spot.studies.statistics import NO_KNN, difference, over_seeds
from spot.studies.study import Result, Row, Study, by_budget, cell, figure, paper_row, pivot, with_counts

DROPOUT, ORACLE = "ViT, patch dropout", "oracle from isotropic"
LINES = (DROPOUT, *PRIORS, ORACLE)
PAPER_TOKENS = (25, 49, 100, 196)

# Backbone → line → (Acc@1, kNN) at 25, 49, 100 and 196 tokens.
PAPER: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "CLS-IN21k": {
        DROPOUT: ((24.72, 27.86), (56.29, 57.19), (78.75, 78.77), (85.11, 83.96)),
        "uniform": ((44.05, 45.23), (67.77, 66.38), (79.64, 78.03), (83.76, 81.85)),
        "gaussian": ((45.22, 45.27), (68.64, 66.96), (79.75, 77.74), (83.45, 81.48)),
        "sobol": ((43.67, 46.48), (69.02, 68.60), (81.63, 79.35), (84.66, 82.62)),
        "isotropic": ((46.85, 48.19), (70.61, 70.29), (82.20, 80.73), (85.15, 83.42)),
        "center": ((52.45, 52.18), (69.22, 68.16), (80.84, 78.56), (84.01, 82.23)),
        "salient": ((55.71, 56.65), (72.89, 72.38), (79.91, 80.56), (84.56, 82.59)),
        ORACLE: ((81.70, 70.65), (94.28, 88.58), (95.97, 92.92), (96.12, 93.52)),
    },
    "CLS-IN1k": {
        DROPOUT: ((9.24, 12.05), (41.05, 44.38), (71.22, 71.41), (79.14, 77.64)),
        "uniform": ((29.87, 33.88), (60.64, 60.84), (74.44, 73.18), (79.38, 77.36)),
        "gaussian": ((29.27, 33.07), (60.47, 60.23), (74.37, 72.82), (79.02, 77.00)),
        "sobol": ((30.67, 35.23), (64.42, 63.88), (76.45, 75.18), (79.96, 78.17)),
        "isotropic": ((33.52, 37.84), (66.18, 66.25), (77.58, 76.29), (80.61, 79.04)),
        "center": ((39.91, 42.47), (63.04, 62.65), (75.41, 73.63), (79.32, 77.71)),
        "salient": ((39.83, 43.72), (66.32, 66.00), (74.36, 75.25), (79.54, 78.03)),
        ORACLE: ((73.99, 74.42), (94.21, 90.11), (95.79, 93.61), (96.04, 93.97)),
    },
    "MAE-IN1k": {
        DROPOUT: ((55.43, 48.85), (70.69, 67.15), (79.53, 78.41), (83.60, 82.07)),
        "uniform": ((56.71, 49.72), (73.22, 65.85), (80.53, 74.76), (82.78, 78.21)),
        "gaussian": ((57.58, 49.49), (72.51, 65.59), (80.31, 74.52), (82.55, 77.90)),
        "sobol": ((60.62, 53.54), (75.71, 68.71), (82.19, 76.24), (83.51, 79.09)),
        "isotropic": ((61.72, 54.56), (76.84, 70.02), (82.76, 77.24), (83.89, 79.53)),
        "center": ((62.83, 55.61), (74.63, 67.31), (81.06, 75.20), (82.97, 78.54)),
        "salient": ((66.13, 60.80), (77.10, 72.24), (81.46, 77.25), (81.64, 79.13)),
        ORACLE: ((90.93, 79.73), (94.87, 87.87), (96.09, 90.76), (96.24, 91.28)),
    },
}


def run(lab: Lab) -> Result:
    """Every line at every budget; the sparse one over seeds, the others once."""
    rows: list[Row] = []
    absent = [backbone.name for backbone in lab.backbones if backbone.parent is None]
    for backbone in lab.backbones:
        cells = 0 if backbone.parent is None else len(backbone.model.grid())  # that patch dropout can choose from
        settings = {
            (line, tokens): lab.seeded(
                "patch-dropout" if line == DROPOUT else line, tokens, None if tokens == lab.sparse else 1
            )
            for tokens in lab.tokens
            for line in LINES[:-1]
            if line != DROPOUT or tokens <= cells
        }
        made = lab.accuracies(backbone, settings, knn=True)
        for tokens in lab.tokens:
            about: Row = {"backbone": backbone.name, "tokens": tokens}
            for line in (line for line in LINES if (line, tokens) in made):
                own = made[line, tokens]
                row = {**about, "placement": line, **over_seeds(own)}
                if line != "isotropic":
                    row |= difference(made["isotropic", tokens][0].right, torch.stack([each.right for each in own]))
                rows.append(row)
            searched = lab.at(backbone, lab.oracle(backbone, tokens=tokens), bank=Setting("isotropic", tokens))
            rows.append({**about, "placement": ORACLE, **over_seeds([searched])})
    notes = [
        lab.differs(),
        f"At {lab.sparse} tokens random placements are means over {lab.settings.seeds} seeds, at more tokens of one. "
        "Salient, focus and oracle know more than the model: the object's place, or the label. Focus is ours: even "
        "coverage drawn towards what is salient.",
        "Oracle: 5 steps at 0.003. Its kNN compares searched images with a bank placed by isotropic.",
    ]
    if absent:
        notes.append(
            f"{DROPOUT} needs the plain ViT, which is not there for {', '.join(absent)}; give it as NAME=FILE."
        )
    if any(row.get("knn") is None for row in rows if row["placement"] != ORACLE):
        notes.append(NO_KNN)
    cells = len(lab.backbones[0].model.grid())
    return Result(rows, paper_rows(), notes, data={"cells": cells, "paper_cells": PAPER_TOKENS[-1]})


def paper_rows() -> list[Row]:
    return [
        paper_row(backbone, tokens=tokens, placement=line, top1=top1, knn=knn)
        for backbone, lines in PAPER.items()
        for line, values in lines.items()
        for tokens, (top1, knn) in zip(PAPER_TOKENS, values, strict=True)
    ]


def table(result: Result) -> list[Row]:
    """Acc@1 with its interval and kNN, a column per budget; ours, then the paper's, which has other budgets."""

    def both(row: Row) -> str:
        return cell(row) + (f" / {row['knn']:.1f}" if row.get("knn") is not None else "")

    ours = with_counts(Result(result.rows), "placement")
    named = [{**row, "budget": budget} for row, budget in by_budget(ours, result.paper)]
    parts = (named[: len(ours)], named[len(ours) :])
    return [line for rows in parts for line in pivot(rows, ("backbone", "placement"), "budget", both)]


def points(result: Result) -> list[Row]:
    """Every row with its share of its grid, in percent."""
    cells = [result.data["cells"]] * len(result.rows) + [result.data["paper_cells"]] * len(result.paper)
    rows = with_counts(result, "placement")
    return [{**row, "share": 100 * row["tokens"] / count} for row, count in zip(rows, cells, strict=True)]


STUDY = Study(
    "classification", "tab:imgcls",
    "How accurate are priors, budgets and backbones (Acc@1 / kNN), beside a plain ViT on fewer patches and the oracle?",
    run,
    figure(
        "accuracy.accuracy", points, line="placement", across="share", panel="backbone",
        across_label="tokens, % of the grid",
        title="Top-1 accuracy by placement and budget: ours, and the paper's on ImageNet",
    ),
    table,
)  # fmt: skip
