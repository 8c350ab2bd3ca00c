"""The page of the study `signs`: its table, a plot of accuracy against cost, and a picture of hits and misses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from paper.provenance import file_hashes, sentence
from paper.study import Table, cell, formatted, number, page, signed
from spot import report
from spot.models.glimpsed import Glimpsed
from spot.models.spot_vit import SpotViT
from spot.placement.glimpses import cut_out
from spot.plots import save
from spot.plots.layout import PlainFigure
from spot.store import write_json, write_text

if TYPE_CHECKING:
    from paper.signs import Street

Rows = Sequence[dict[str, Any]]
QUESTION = "Where are 49 tokens worth most in a street of 1360 × 800 pixels? The paper has no such table."
TOLD = "told the box"  # the beginning of the names of inputs that know the sign
COLOURS = {
    "frozen": "#888888",
    "fine-tuned": "#d98c00",
    "finder from boxes": "#2a788e",
    "finder from labels": "#c8102e",
    "one stage, from boxes": "#8fc1cb",
    "one stage, from labels": "#eb9aa8",
}
TABLE: Table = {
    "training": "training", "input": "input", "tokens": "tokens", "top-1, %": cell,
    "GMACs": number("GMACs", ".2f"),
    "ms": number("ms", ".0f"),
    "3 × 16 tokens, from labels, minus this row": signed,
}  # fmt: skip


def write_page(
    rows: Rows,
    other_costs: Mapping[str, Mapping[str, float]],
    street: "Street",
    models: Mapping[str, tuple[SpotViT, dict[str, Tensor]]],
    predicted: Mapping[str, Tensor],
    out: Path,
) -> None:
    """Write the table as JSON and Markdown, its plot, and the pictures."""
    val = street.val
    kinds = {row: [val.classes[index] for index in each.tolist()] for row, each in predicted.items()}
    written = {"rows": list(rows), "keys": list(val.keys), "predicted": kinds}
    settings = {"models": {"vit-ti": {"source": "vit-ti", **file_hashes("vit-ti")}}, "data": "GTSDB"}
    write_json(out / "signs.json", {"settings": settings, **written})
    table = formatted(rows, TABLE)
    always = max(val.labels.count(kind) for kind in set(val.labels)) / len(val)
    notes = [
        f"{len(val)} photographs with 95 % intervals. Always answering the most frequent class has {always:.1%}.",
        f"frozen: a linear head on features of the retrofitted ViT-Ti, fitted on {len(street.train)} pictures.",
        "fine-tuned: the whole ViT-Ti on shrunk pictures, with the steps, batches and rates of the finder's rows.",
        "finder from boxes, finder from labels: models of `spot learn --look glimpses` with and without `--boxes`.",
        "one stage: the same models without the finder's second stage (`--glimpses.candidates 0`).",
        f"{TOLD}: on the largest sign, which no method knows. A street without signs has its glimpse at the place "
        "and size of another picture's sign.",
        "GMACs and ms: one picture in memory, batch 1, processor time of one thread, with finder or saliency map.",
        *(f"{name}: {each['GMACs']:.2f} GMACs, {each['ms']:.0f} ms." for name, each in other_costs.items()),
    ]
    shown = ["![accuracy against cost](signs.png)", *(f"![hits and misses, {name}]({name}.png)" for name in models)]
    source = f"Data: GTSDB, Houben et al., IJCNN 2013. {sentence(settings)}"
    write_text(out / "signs.md", page("# signs", QUESTION, report.markdown(table), notes, *shown, source))
    report.show(table, "signs")
    save(against_cost(rows), out / "signs.png")
    for name, (model, made) in models.items():
        save(pictures(street, model, made), out / f"{name}.png")


def against_cost(rows: Rows) -> Figure:
    """Accuracy against multiply-adds and against time."""
    figure = PlainFigure(11, 4.6, dpi=130)
    for axes, price, label in zip(
        figure.subplots(1, 2),
        ("GMACs", "ms"),
        ("GMACs, log scale", "milliseconds of one thread, log scale"),
        strict=True,
    ):
        for training, colour in COLOURS.items():
            line = [row for row in rows if row["training"] == training and price in row]
            for told, marker in ((False, "o"), (True, "^")):
                some = [row for row in line if row["input"].startswith(TOLD) == told]
                errors = [[row["top1"] - row["low"] for row in some], [row["high"] - row["top1"] for row in some]]
                where = [row[price] for row in some], [row["top1"] for row in some]
                axes.errorbar(*where, errors, fmt=marker, color=colour, alpha=0.75, label=None if told else training)
        axes.plot([], [], "^", color="black", label=TOLD)
        axes.set(xscale="log", xlabel=label, ylabel="top-1, %", ylim=(20, 100))
        ticks = [0.3, 1, 3, 10, 30, 100] if price == "GMACs" else [30, 100, 300, 1000, 3000]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.legend(fontsize=7, loc="upper right")
    figure.suptitle("146 streets of 1360 × 800 pixels, five kinds of signs", fontsize=11)
    return figure


def pictures(street: "Street", model: SpotViT, made: Mapping[str, Tensor]) -> Figure:
    """Streets with the classified places and the tokens' input: four hits, then four misses."""
    val, number = street.val, 3 if model.tokens < 25 else 1
    several = Glimpsed(model, number)
    predicted = several.picture_logits(made["tokens"][:, :number]).argmax(1)
    truth = torch.tensor(val.labels)
    signs = truth != (-1 if several.none is None else several.none)
    hits, misses = ((predicted == truth) & signs).nonzero()[:, 0], ((predicted != truth) & signs).nonzero()[:, 0]
    half = 4
    chosen = [index for part in (hits, misses) for index in part[:: max(1, len(part) // half)][:half].tolist()]
    figure = PlainFigure(12, 7.2, dpi=110)
    cells = figure.subplots(half, 4, width_ratios=[5, 1, 5, 1])
    side = round(model.tokens**0.5) * model.patch_size
    for place, index in enumerate(chosen):
        axes, inset = cells[place % half][2 * (place // half)], cells[place % half][2 * (place // half) + 1]
        pixels = val.pixels(index)
        height, width = pixels.shape[1:]
        axes.imshow(pixels.permute(1, 2, 0).numpy())
        views = []
        for y, x, wide in made["places"][index, :number, :3].tolist():
            corner = (x * width - wide / 2, y * height - wide / 2)
            axes.add_patch(Rectangle(corner, wide, wide, fill=False, edgecolor="yellow", linewidth=1.5))
            views.append(cut_out(pixels, y * height, x * width, wide, side))
        for y, x, size, _ in street.places[val.keys[index]].tolist():
            corner = (x - size / 2 - 8, y - size / 2 - 8)
            axes.add_patch(Rectangle(corner, size + 16, size + 16, fill=False, edgecolor="red", linewidth=1))
        inset.imshow(torch.cat(views, 1).permute(1, 2, 0).clamp(0, 255).byte().numpy())
        axes.set_title(f"{val.classes[int(truth[index])]}; predicted: {val.classes[int(predicted[index])]}", fontsize=8)
    for axes in cells.flat:
        axes.axis("off")
    figure.suptitle(
        "Hits (left) and misses (right): glimpses in yellow, signs in red, and what the tokens saw", fontsize=10
    )
    return figure
