"""From a fifth of the tokens to all of them: SPoT and elastic windows with the same weights.

The paper compares its results with published results of a trained ElasticViT, whose weights are not
available here. Instead the retrofitted model itself is measured with three placements: windows on whole
pixels that are randomly shifted, rescaled and dropped, as in ElasticViT's training; patches of the grid,
randomly dropped; and SPoT's isotropic placement.
"""

from dataclasses import replace

from paper.lab import Lab
from paper.statistics import accuracy_row, difference
from paper.study import Result, Row, Study, cell, figure, paper_row, pivot, signed
from spot.evaluation.accuracy import Setting
from spot.plots.accuracy import accuracy

SPOT, ELASTIC, DROPPED = "SPoT, isotropic", "elastic windows", "patch dropout"
PLACEMENTS = {ELASTIC: "elastic", DROPPED: "patch-dropout", SPOT: "isotropic"}
TENTHS = range(2, 11)  # of the grid: 39, 59, … 196 of 196
SCENES = 512  # limit for the built-in images, because nine budgets are many rows

PAPER: dict[str, tuple[float, ...]] = {
    "ElasticViT, as published": (67.17, 72.65, 75.47, 77.47, 78.18, 79.73, 80.81, 81.31, 82.04),
    SPOT: (71.81, 77.86, 80.47, 81.89, 82.55, 83.05, 83.34, 83.52, 83.85),
}


def budgets(cells: int) -> list[int]:
    """The paper's nine budgets, tenths of the grid, for a grid with this many cells."""
    return [max(1, round(cells * tenth / 10)) for tenth in TENTHS]


def run(lab: Lab) -> Result:
    """Three placements at nine budgets; SPoT is compared with each of the others image by image."""
    if lab.settings.scenes:
        limit = min(SCENES, lab.settings.limit or SCENES)
        lab = Lab(lab.backbones, replace(lab.settings, limit=limit), cache=lab.cache.folder)
    rows: list[Row] = []
    for backbone in lab.backbones:
        cells = len(backbone.model.grid())
        asked = {(name, n): Setting(each, n) for n in budgets(cells) for name, each in PLACEMENTS.items()}
        made = lab.accuracy(backbone, {line: lab.same_weights(backbone, each) for line, each in asked.items()})
        for (name, tokens), predictions in made.items():
            row: Row = {"backbone": backbone.name, "placement": name, "tokens": tokens, "share": 100 * tokens / cells}
            row |= accuracy_row(predictions.right)
            if name != SPOT:
                row |= difference(predictions.right, made[SPOT, tokens].right)
            rows.append(row)
    paper = [
        paper_row("MAE-IN1k", placement=name, tokens=tokens, share=100 * tokens / 196, top1=value)
        for name, values in PAPER.items()
        for tokens, value in zip(budgets(196), values, strict=True)
    ]
    notes = [
        lab.conditions(searched=False),
        "All our rows have the same retrofitted weights and one seed. Elastic windows begin and end on whole pixels, "
        "are shifted by up to half a patch, and have half to twice its side, drawn for each window. These weights were "
        "not trained on such windows. The paper's ElasticViT was, and its row is as published.",
        "The difference is SPoT minus the placement at the same budget, on the same images; p is McNemar's, exact.",
    ]
    return Result(rows, paper, notes, {"images": rows[0]["images"]})


def table(result: Result) -> list[Row]:
    """A column per budget: accuracy, and below it SPoT's gain over the other placements."""
    lines: list[Row] = []
    for rows in (result.rows, result.paper):
        named = [{**row, "budget": f"{round(row['share'], -1):.0f} %"} for row in rows]  # 41 % of 64 and 40 % of 196
        lines += pivot(named, ("backbone", "placement"), "budget", cell)
        gains = [{**row, "placement": f"SPoT minus {row['placement']}"} for row in named if "delta" in row]
        lines += pivot(gains, ("backbone", "placement"), "budget", signed) if gains else []
    return lines


STUDY = Study(
    "elastic", "tab:elasticvit",
    "How accurate are SPoT's placements at many budgets, compared with elastic windows on whole pixels?",
    run,
    figure(
        accuracy, line="placement", across="share", panel="backbone", log=False,
        across_label="tokens, % of the grid", title="SPoT and elastic windows, from a fifth of the tokens to all",
    ),
    table,
)  # fmt: skip
