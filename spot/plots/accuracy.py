"""Accuracy against what it costs: a line per placement, with 95 % intervals, and the paper's dashed beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from spot.errors import InputError
from spot.plots.bars import distinct
from spot.plots.palette import palette
from spot.plots.panels import columns_of, panels_of
from spot.store import whole

COSTS = {"tokens": "tokens", "gmacs": "multiply-adds per image, in billions", "ms": "milliseconds per image, measured"}
SCORES = {"top1": "top-1 accuracy, %", "knn": "kNN accuracy, %"}


def accuracy(rows: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "") -> None:
    """Save a figure of rows as `spot evaluate` makes them.

    rows: "placement", "tokens" and "top1" or "knn" in percent; "low" and "high" are the interval of
        top1, and with "gmacs" a second panel shows the cost.
    """
    score = next((name for name in SCORES if all(name in row for row in rows)), None)
    if not rows or score is None:
        raise InputError("a figure of accuracy needs rows with top1 or knn")
    costs = [name for name in COSTS if all(name in row for row in rows)]
    check_ending(path)
    figure = Figure(figsize=(4.6 * len(costs) + 1.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(str(row["placement"]), []).append(row)
    for axes, cost in zip(panels, costs, strict=True):
        for index, (name, members) in enumerate(lines.items()):
            draw(axes, sorted(members, key=lambda row: row[cost]), name, cost, score, f"C{index % 10}")
        values = sorted({row[cost] for row in rows})
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(apart(values)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:.0f}" if value >= 10 else f"{value:.2g}")
        )
        axes.set_xlabel(COSTS[cost])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(SCORES[score])
    figure.suptitle(title, fontsize=11)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", frameon=False)
    with whole(path) as temporary:
        figure.savefig(temporary, dpi=150)


def accuracy_lines(
    rows: Sequence[Mapping[str, Any]],
    paper: Sequence[Mapping[str, Any]] = (),
    *,
    line: str = "placement",
    across: str = "tokens",
    value: str = "top1",
    low: str = "low",
    high: str = "high",
    panel: str | None = None,
    across_label: str = "tokens",
    label: str = "top-1 accuracy, %",
    title: str = "",
    log: bool = True,
) -> Figure:
    """A line per placement over budgets: ours with intervals, the paper's dashed in the same colour.

    Args:
        rows, paper: tables with the columns named by the other arguments; the interval may be missing.
        line: which line a row belongs to. A line of the paper has the colour of ours of the same name.
        across: what the horizontal axis shows, such as tokens, or share: models of different grids meet there.
        panel: a column whose values get a panel each, three to a row; one that only the paper has is not drawn.
        log: whether the horizontal axis is logarithmic.
    """
    if not rows:
        raise InputError("a figure of accuracy needs at least one row")
    names = list(dict.fromkeys([*distinct(rows, line), *distinct(paper, line)]))
    colours = dict(zip(names, palette(len(names)), strict=True))
    panels = distinct(rows, panel) if panel else [None]
    columns = columns_of(len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns + 1.8, 3.6 * lines + 0.4), dpi=150, layout="constrained")
    handles: dict[str, Any] = {}
    grid = panels_of(figure, len(panels))
    for axes, each in zip(grid, panels, strict=True):
        for table, ours in ((rows, True), (paper, False)):
            part = [row for row in table if panel is None or str(row[panel]) == each]
            for name in distinct(part, line):
                points = [row for row in part if str(row[line]) == name and row.get(value) is not None]
                points.sort(key=lambda row: row[across])
                x, y = ([row[column] for row in points] for column in (across, value))
                style: dict[str, Any] = {"marker": "o", "markersize": 4, "color": colours[name]}
                if not ours:
                    style |= {"linestyle": "--", "markerfacecolor": "white", "linewidth": 1.1, "alpha": 0.8}
                text = name if ours else f"{name}, the paper"
                handles[text] = axes.plot(x, y, label=text, **style)[0]
                known = [row for row in points if row.get(low) is not None and row.get(high) is not None]
                if ours and known:
                    span = [
                        [max(0.0, row[value] - row[low]) for row in known],
                        [max(0.0, row[high] - row[value]) for row in known],
                    ]
                    places = ([row[across] for row in known], [row[value] for row in known])
                    axes.errorbar(*places, yerr=span, fmt="none", ecolor=colours[name], alpha=0.6, capsize=2)
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(apart(sorted({row[across] for row in [*rows, *paper]}), 1.25)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:.3g}"))
        axes.set_xlabel(across_label)
        axes.set_title("" if each is None else str(each), fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel(label)
    figure.legend(handles=list(handles.values()), loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def check_ending(path: str | Path) -> None:
    """Refuse a picture of a kind that cannot be drawn, before the work is done that it shows."""
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise InputError(f"a picture can be {', '.join(kinds)}, got {path}")


def draw(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str, cost: str, score: str, colour: str) -> None:
    """One placement: a marker per budget with its interval, or a level if it has one budget only."""
    across = [row[cost] for row in rows]
    up = [row[score] for row in rows]
    if len(rows) == 1:
        axes.axhline(up[0], color=colour, linestyle=":", linewidth=1)
    axes.plot(across, up, marker="o", markersize=4, color=colour, label=name)
    if score == "top1" and all("low" in row for row in rows):
        below = [row["top1"] - row["low"] for row in rows]
        above = [row["high"] - row["top1"] for row in rows]
        axes.errorbar(across, up, yerr=[below, above], fmt="none", ecolor=colour, alpha=0.5, capsize=2)


def apart(values: Sequence[float], ratio: float = 1.15) -> list[float]:
    """Ticks at these values, without those that would be printed over the one before."""
    kept: list[float] = []
    for value in values:
        if not kept or value >= kept[-1] * ratio:
            kept.append(value)
    return kept
