"""Are grids a limitation? Searched positions, on the grid and off it, at about 12.5 % of the tokens.

The grid rows are the same search with its final positions moved to the nearest cells, as in the paper.
"""

from spot.placement.oracle import PRESETS
from spot.studies.lab import Lab
from spot.studies.statistics import difference, predicted, share
from spot.studies.study import Result, Row, Study, Table, cell, figure, p_value, paper_row, signed

PRIOR, GRID, SUBPIXEL = "prior", "oracle, grid", "oracle, subpixel"

PAPER: list[Row] = [
    {"placement": PRIOR, "top1": 61.7},
    {"placement": GRID, "lr": 3e-3, "steps": 5, "top1": 66.2},
    {"placement": GRID, "lr": 1e-2, "steps": 10, "top1": 74.0},
    {"placement": SUBPIXEL, "lr": 3e-3, "steps": 5, "top1": 90.2, "delta": 24.0},
    {"placement": SUBPIXEL, "lr": 1e-2, "steps": 10, "top1": 90.9, "delta": 16.9},
]


def run(lab: Lab) -> Result:
    """Both learning rates, from the isotropic prior; each grid row is paired with its subpixel row."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        about = {"backbone": backbone.name, "tokens": lab.sparse}
        grid, free = [], []
        for preset in (PRESETS["paper"], PRESETS["paper-long"]):
            placements = lab.oracle(backbone, preset=preset)
            there, moved = predicted(placements), lab.at(backbone, placements, snap=True)
            how = {"steps": preset.steps, "lr": preset.lr}
            grid.append({**about, "placement": GRID, **how, **share(moved.right)})
            gain = difference(moved.on(there.keys).right, there.right)
            free.append({**about, "placement": SUBPIXEL, **how, **share(there.right), **gain})
        rows += [{**about, "placement": PRIOR, **share(predicted(placements, 0).right)}, *grid, *free]
    notes = [
        lab.differs(),
        "gain is subpixel minus grid at the same learning rate, on the same images; p is McNemar's, exact.",
        f"The search knows the label. It has {lab.sparse} of {len(lab.backbones[0].model.grid())} tokens (the paper's: "
        "25 of 196). On the grid two tokens may share a cell.",
    ]
    return Result(rows, [paper_row("MAE-IN1k", tokens=25, **row) for row in PAPER], notes)


TABLE: Table = {
    "backbone": "backbone", "tokens": "tokens", "placement": "placement",
    "steps × lr": lambda row: f"{row['steps']} × {row['lr']:g}" if "lr" in row else "",
    "top-1 %": cell, "gain over grid": lambda row: signed(row) if "delta" in row else "", "p": p_value,
    "images": "images",
}  # fmt: skip


def bars(result: Result) -> list[Row]:
    return [
        {**row, "where": row["placement"] + (f", {row['steps']} steps at {row['lr']:g}" if row.get("steps") else "")}
        for row in [*result.rows, *result.paper]
    ]


STUDY = Study(
    "off-grid", "tab:off_grid_vs_grid",
    "Are grids a limitation: how much do searched positions lose when they must lie on the patch grid?",
    run,
    figure(
        "bars.grouped_bars", bars, group="backbone", bar="where", value="top1", low="low", high="high",
        label="top-1 accuracy, %", title="Searched positions, moved to the grid and free",
    ),
    TABLE,
)  # fmt: skip
