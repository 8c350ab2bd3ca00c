"""Plots of accuracy against cost, one line per placement, and of measured speed-up against the ratio of MACs."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from spot.errors import InputError
from spot.plots.layout import MARKERS, Row, colours_of, distinct, interval, legend, panels, parts_of

COSTS = {
    "tokens": "tokens",
    "pixels": "pixels a side of the image",
    "gmacs": "multiply-adds per image, in billions",
    "ms": "milliseconds per image, measured",
}
SCORES = {"top1": "top-1 accuracy, %", "knn": "kNN accuracy, %"}


def accuracy(
    rows: Sequence[Row],
    *,
    line: str = "placement",
    across: str | None = None,
    value: str | None = None,
    panel: str | None = None,
    across_label: str = "",
    label: str = "",
    title: str = "",
    log: bool = True,
    numbers: tuple[str, str] | None = None,
) -> Figure:
    """Plot accuracy over budgets, one line per placement. The legend is sorted by accuracy with the fewest tokens.

    Args:
        rows: a table with the columns named by the other arguments; the interval is optional.
        line: the column that assigns rows to lines.
        across: column of the horizontal axis. By default tokens, with the costs that all rows contain. If methods of
            one budget differ in cost, each cost gets its own panel.
        value: column of the vertical axis; by default top1, or knn without top1. Its interval is in the columns
            VALUE_low and VALUE_high; that of top1 in low and high.
        panel: a column with one panel for each of its values.
        log: whether the horizontal axis is logarithmic.
        numbers: a line and a column, whose values annotate that line's points.
    """
    value = value or next((name for name in SCORES if all(name in row for row in rows)), None)
    if not rows or value is None:
        raise InputError("a figure of accuracy needs rows with top1 or knn")
    low, high = ("low", "high") if value == "top1" else (f"{value}_low", f"{value}_high")
    rows = [row for row in rows if row.get(value) is not None]
    costs = [name for name in COSTS if all(name in row for row in rows)] if across is None else [across]
    stacked = len({tuple(row[cost] for cost in costs) for row in rows}) == len({row[costs[0]] for row in rows})
    shown = [(name, part, costs[0]) for name, part in parts_of(rows, panel).items()]
    if not stacked and panel is None:
        shown = [("", list(rows), cost) for cost in costs]
    names = distinct(rows, line)
    colours, markers = colours_of(names), {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(names)}
    figure, grid = panels(len(shown), title, label or SCORES.get(value, value), sharex=panel is not None)
    handles: dict[str, Any] = {}
    for axes, (heading, part, cost) in zip(grid, shown, strict=True):
        for name in distinct(part, line):
            points = sorted((row for row in part if str(row[line]) == name), key=lambda row: row[cost])
            handles[name] = axes.plot(
                [row[cost] for row in points], [row[value] for row in points], label=name, color=colours[name],
                marker=markers[name], markersize=5.5, linewidth=1.3,
            )[0]  # fmt: skip
            for row in points:
                interval(axes, row[cost], row, value, low, high, colours[name])
                if numbers and name == numbers[0]:
                    place = (row[cost], row[value])
                    axes.annotate(
                        f"{row[numbers[1]]}", place, (-5, -4), textcoords="offset points", ha="right", va="top"
                    )
            if len(points) == 1 and across is None:  # one budget only: a level line across the panel
                axes.axhline(points[0][value], color=colours[name], linestyle=":", linewidth=1)
        if log:
            axes.set_xscale("log")
            _ticks(axes, part, costs if stacked else [cost], {row[cost] for row in rows})
        axes.set_title(heading, fontsize=10)
        text = across_label or "\n".join(COSTS.get(name, name) for name in (costs if stacked else [cost]))
        if panel is None:
            axes.set_xlabel(text)
        else:  # one for all panels
            figure.supxlabel(text, fontsize="medium")
    at_fewest = {str(row[line]): row[value] for row in sorted(rows, key=lambda row: -row[costs[0]])}
    legend(figure, [handles[name] for name in sorted(handles, key=lambda name: -at_fewest[name])])
    return figure


def throughput(rows: Sequence[Row], title: str = "") -> Figure:
    """Plot measured speed-up against the ratio of MACs, one panel per batch size.

    rows have `method`, `batch`, `budget`, `MAC ratio` and `speed-up`, as `spot bench` writes them. Each
    method is one line. Budgets annotate the points of the second method, which follows the reference.
    """
    if not rows:
        raise InputError("a figure of throughput needs at least one row")
    named = [{**row, "panel": f"batch {row['batch']}"} for row in sorted(rows, key=lambda row: row["batch"])]
    annotated = distinct(rows, "method")[:2][-1]
    figure = accuracy(
        named, line="method", across="MAC ratio", value="speed-up", panel="panel", across_label="MAC ratio",
        label="measured speed-up", title=title, numbers=(annotated, "budget"),
    )  # fmt: skip
    both = [row[name] for row in rows for name in ("MAC ratio", "speed-up")]
    low, high = min(both), max(both)
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if low / 1.5 <= tick <= high * 1.5]
    for axes in figure.axes:
        axes.plot([low, high], [low, high], color="0.75", linewidth=1, zorder=0)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, labels=[f"{tick:g}×" for tick in ticks])
            axis.set_ticks([], minor=True)
    return figure


def _ticks(axes: Axes, rows: Sequence[Row], costs: Sequence[str], values: set[float]) -> None:
    """Set a tick at each budget, with its cost below, unless labels would overlap."""
    further = {row[costs[0]]: [f"{row[cost]:.2g}" for cost in costs[1:]] for row in rows}

    def text(tick: float, _: int) -> str:
        number = f"{tick:,.0f}" if tick >= 1000 else f"{tick:.3g}"
        return "\n".join([number, *further.get(tick, [])])

    axes.xaxis.set_major_locator(FixedLocator(apart(sorted(values))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(text))


def apart(values: Sequence[float]) -> list[float]:
    """Select ticks from sorted values, with a ratio of at least 1.25 so that their labels do not overlap."""
    kept: list[float] = []
    for value in values:
        if not kept or value >= 1.25 * kept[-1]:
            kept.append(value)
    return kept
