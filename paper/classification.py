"""Priors, budgets and backbones: Acc@1 and kNN, with baselines and the oracle.

The paper compares retrofitted models with a plain ViT on random patches of its grid, which changes both weights and
placement. Random patches, and a smaller image, are therefore also measured with the retrofitted weights.
"""

from paper.backbone import Backbone, shrinkable, vit_b16_macs
from paper.lab import Lab
from paper.priors import CENTER, CENTER_NOTE, PRIORS, learned_prior
from paper.statistics import NO_KNN, Predictions, difference, over_seeds, stacked
from paper.study import Result, Row, Study, by_budget, cell, figure, paper_row, pivot, with_counts
from spot.evaluation.accuracy import Setting
from spot.evaluation.cost import macs
from spot.plots.accuracy import accuracy

DROPOUT, ORACLE = "ViT, patch dropout", "oracle from isotropic"
SMALLER = "ViT, smaller image"
SAME_DROPOUT, SAME_SMALLER = "patch dropout, SPoT's weights", "smaller image, SPoT's weights"
PLAIN = {DROPOUT: "patch-dropout", SMALLER: "resize"}  # with the plain ViT's weights
FIXED = "isotropic, scale 1"  # for a model with windows of another scale: patches of the grid have scale 1
SAME = {SAME_DROPOUT: "patch-dropout", SAME_SMALLER: "resize"}  # with the retrofitted ones
TABLE_ONLY = ("uniform", "gaussian", "sobol")
SEEDS = 5  # of random patches with the retrofitted weights, at every budget
PAPER_TOKENS = (25, 49, 100, 196)

# Backbone → line → (Acc@1, kNN) at 25, 49, 100 and 196 tokens.
PAPER: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "CLS-IN21k": {
        DROPOUT: ((24.72, 27.86), (56.29, 57.19), (78.75, 78.77), (85.11, 83.96)),
        "uniform": ((44.05, 45.23), (67.77, 66.38), (79.64, 78.03), (83.76, 81.85)),
        "gaussian": ((45.22, 45.27), (68.64, 66.96), (79.75, 77.74), (83.45, 81.48)),
        "sobol": ((43.67, 46.48), (69.02, 68.60), (81.63, 79.35), (84.66, 82.62)),
        "isotropic": ((46.85, 48.19), (70.61, 70.29), (82.20, 80.73), (85.15, 83.42)),
        CENTER: ((52.45, 52.18), (69.22, 68.16), (80.84, 78.56), (84.01, 82.23)),
        "salient": ((55.71, 56.65), (72.89, 72.38), (79.91, 80.56), (84.56, 82.59)),
        ORACLE: ((81.70, 70.65), (94.28, 88.58), (95.97, 92.92), (96.12, 93.52)),
    },
    "CLS-IN1k": {
        DROPOUT: ((9.24, 12.05), (41.05, 44.38), (71.22, 71.41), (79.14, 77.64)),
        "uniform": ((29.87, 33.88), (60.64, 60.84), (74.44, 73.18), (79.38, 77.36)),
        "gaussian": ((29.27, 33.07), (60.47, 60.23), (74.37, 72.82), (79.02, 77.00)),
        "sobol": ((30.67, 35.23), (64.42, 63.88), (76.45, 75.18), (79.96, 78.17)),
        "isotropic": ((33.52, 37.84), (66.18, 66.25), (77.58, 76.29), (80.61, 79.04)),
        CENTER: ((39.91, 42.47), (63.04, 62.65), (75.41, 73.63), (79.32, 77.71)),
        "salient": ((39.83, 43.72), (66.32, 66.00), (74.36, 75.25), (79.54, 78.03)),
        ORACLE: ((73.99, 74.42), (94.21, 90.11), (95.79, 93.61), (96.04, 93.97)),
    },
    "MAE-IN1k": {
        DROPOUT: ((55.43, 48.85), (70.69, 67.15), (79.53, 78.41), (83.60, 82.07)),
        "uniform": ((56.71, 49.72), (73.22, 65.85), (80.53, 74.76), (82.78, 78.21)),
        "gaussian": ((57.58, 49.49), (72.51, 65.59), (80.31, 74.52), (82.55, 77.90)),
        "sobol": ((60.62, 53.54), (75.71, 68.71), (82.19, 76.24), (83.51, 79.09)),
        "isotropic": ((61.72, 54.56), (76.84, 70.02), (82.76, 77.24), (83.89, 79.53)),
        CENTER: ((62.83, 55.61), (74.63, 67.31), (81.06, 75.20), (82.97, 78.54)),
        "salient": ((66.13, 60.80), (77.10, 72.24), (81.46, 77.25), (81.64, 79.13)),
        ORACLE: ((90.93, 79.73), (94.87, 87.87), (96.09, 90.76), (96.24, 91.28)),
    },
}
PAPER_ISOTROPIC = {backbone: lines["isotropic"][0][0] for backbone, lines in PAPER.items()}  # Acc@1 at 25 tokens


def run(lab: Lab) -> Result:
    """Every line at every budget; over seeds at the sparse budget and for random patches."""
    rows: list[Row] = []
    absent = [backbone.name for backbone in lab.backbones if backbone.parent is None]
    for backbone in lab.backbones:
        dense = lab.cost(backbone, Setting("isotropic", len(backbone.model.grid())))["GMACs"]
        for (line, tokens), own in measured(lab, backbone).items():
            row: Row = {"backbone": backbone.name, "tokens": tokens, "placement": line, **over_seeds(own["right"])}
            if line != "isotropic":
                row |= difference(own["even"], stacked(own["right"]))
            row |= lab.cost(backbone, own["setting"])
            rows.append(row | {"cost": 100 * row["GMACs"] / dense})
        for tokens in lab.tokens if lab.wanted([ORACLE]) else ():
            even = Setting("isotropic", tokens)
            bank = even if tokens in knn_budgets(lab) else None
            searched = lab.at(backbone, lab.oracle(backbone, tokens=tokens), bank=bank)
            row = {"backbone": backbone.name, "tokens": tokens, "placement": ORACLE, **over_seeds([searched])}
            row |= lab.cost(backbone, even)
            rows.append(row | {"cost": 100 * row["GMACs"] / dense})
    notes = [
        lab.conditions(),
        f"At {lab.sparse} tokens random placements are means over {lab.settings.seeds} seeds. “{SAME_DROPOUT}” is a "
        f"mean over {SEEDS} seeds at every budget, and other rows have one seed. salient and focus use a saliency "
        "map, and the oracle uses the label. focus is ours: isotropic, but denser where the map is high. learned is "
        "ours too: a policy that spot learn trained without labels, where a model has one.",
        "Rows with SPoT's weights are compared with isotropic tokens of the same weights. Where a model has larger "
        f"windows by default, they are compared with windows of scale 1 (“{FIXED}”).",
        CENTER_NOTE,
        map_note(lab),
        "Oracle: 5 steps with learning rate 0.003. Its kNN compares searched images with a bank of isotropic "
        "placements. Its cost does not include the search.",
    ]
    if absent:
        notes.append(f"There are no rows of the plain ViT for {', '.join(absent)}; give it as NAME=FILE.")
    if any(row.get("knn") is None for row in rows if row["placement"] in PRIORS and row["tokens"] in knn_budgets(lab)):
        notes.append(NO_KNN)
    elif len(knn_budgets(lab)) < len(lab.tokens):
        notes.append(f"kNN is measured with {' and '.join(map(str, knn_budgets(lab)))} tokens only, to save time.")
    return Result(rows, paper_rows(), notes)


def measured(lab: Lab, backbone: Backbone) -> dict[tuple[str, int], Row]:
    """By line and budget: predictions with each seed, the setting, and the correctness of isotropic placement."""
    model, cells = backbone.model, len(backbone.model.grid())
    budgets = {"resize": shrinkable(model, lab.tokens), "patch-dropout": [n for n in lab.tokens if n <= cells]}

    def seeded(placement: str, tokens: int) -> list[Setting]:
        return lab.seeded(placement, tokens, None if tokens == lab.sparse else 1)

    plain = {} if backbone.parent is None else PLAIN
    settings = {(line, n): seeded(name, n) for line, name in plain.items() for n in budgets[name]}
    settings |= {(prior, n): seeded(prior, n) for n in lab.tokens for prior in (*PRIORS, *learned_prior(backbone))}
    sized = model.scale not in (None, 1)
    if sized:
        settings |= {(FIXED, n): [Setting("isotropic", n, scale=1)] for n in lab.tokens if n < cells}
    same = lab.wanted(list(SAME)) if backbone.parent_hash != backbone.hash else ()
    chosen = lab.wanted([line for line, _ in settings], ["isotropic", FIXED] if same else ["isotropic"])
    settings = {line: own for line, own in settings.items() if line[0] in chosen}
    for line in same:
        for n in budgets[SAME[line]]:
            if n < cells:
                settings[line, n] = [lab.same_weights(backbone, each) for each in lab.seeded(SAME[line], n, SEEDS)]
    made: dict[tuple[str, int], list[Predictions]] = {}
    for knn in (True, False):
        votes = {(line, n): n in knn_budgets(lab) and line not in SAME for line, n in settings}
        own = {line: each for line, each in settings.items() if votes[line] == knn}
        made |= lab.accuracies(backbone, own, knn=knn)
    even = {line: FIXED if sized and line in SAME else "isotropic" for line, _ in made}
    return {
        (line, n): {"right": right, "setting": settings[line, n][0], "even": made[even[line], n][0].right}
        for (line, n), right in made.items()
    }


def knn_budgets(lab: Lab) -> tuple[int, ...]:
    """The budgets for kNN: all, as in the paper, or two with a limited bank, to save time."""
    return lab.tokens if lab.settings.scenes or lab.settings.bank_limit is None else lab.tokens[:2]


def map_note(lab: Lab) -> str:
    """A note on the cost of saliency maps."""
    cost, name = lab.sources.maps_cost(), lab.sources.maps_name()
    if cost is None:
        return f"salient and focus use {name}, whose cost is not known here and not included."
    dense = macs(lab.backbones[0].model, tokens=len(lab.backbones[0].model.grid()))
    return (
        f"salient and focus use maps of {name}. One map takes {cost / 1e6:,.0f} million multiply-adds, "
        f"{cost / dense:.2g} times the dense {lab.backbones[0].name}; the cost axis and “with maps” include it."
    )


def paper_rows() -> list[Row]:
    """The paper's table, with the multiply-adds of ViT-B/16 in percent of those with all tokens."""
    counted = {tokens: vit_b16_macs(tokens) for tokens in PAPER_TOKENS}
    cost = {tokens: 100 * count / counted[PAPER_TOKENS[-1]] for tokens, count in counted.items()}
    return [
        paper_row(backbone, tokens=tokens, placement=line, top1=top1, knn=knn, cost=cost[tokens])
        for backbone, lines in PAPER.items()
        for line, values in lines.items()
        for tokens, (top1, knn) in zip(PAPER_TOKENS, values, strict=True)
    ]


def table(result: Result) -> list[Row]:
    """Acc@1 with its interval and kNN, a column per budget; our rows, then the paper's, which has other budgets."""

    def both(row: Row) -> str:
        return cell(row) + (f" / {row['knn']:.1f}" if row.get("knn") is not None else "")

    ours = [{**row, "with maps": with_maps(row)} for row in with_counts(Result(result.rows), "placement")]
    named = [{**row, "budget": budget} for row, budget in by_budget(ours, result.paper)]
    parts = (named[: len(ours)], named[len(ours) :])
    return [line for rows in parts for line in pivot(rows, ("backbone", "placement", "with maps"), "budget", both)]


def with_maps(row: Row) -> str:
    """The cost of the sparsest prediction with its map, relative to the dense ViT; empty if no map is used."""
    if "maps" not in row:
        return ""
    if row["maps"] is None:
        return "cost not known"
    return f"{row['maps'] / row['GMACs'] * row['cost'] / 100:.2g} × dense more"


def drawn(result: Result) -> list[Row]:
    """Rows of the figure: only twelve lines are distinguishable, so random priors appear in the table only."""
    return [row for row in with_counts(result, "placement") if row["placement"] not in TABLE_ONLY]


STUDY = Study(
    "classification", "tab:imgcls",
    "How accurate (Acc@1 / kNN) are priors at several budgets, beside a plain ViT on fewer patches and the oracle?",
    run,
    figure(
        accuracy, drawn, line="placement", across="cost", panel="backbone",
        across_label="multiply-adds with those of maps, % of the dense ViT",
        title="Top-1 accuracy by placement and budget: ours, and the paper's on ImageNet",
    ),
    table,
)  # fmt: skip
