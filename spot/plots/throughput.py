"""Measured speed-up against the ratio of multiply-adds: on the diagonal, arithmetic is all that counts."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from spot.errors import InputError
from spot.plots.layout import MARKERS, Row, columns_of, distinct, legend, panels, parts_of


def throughput(rows: Sequence[Row], title: str = "") -> Figure:
    """One panel per batch size.

    rows have `method`, `batch`, `budget`, `MAC ratio` and `speed-up`, as `spot bench` writes them.
    Points of one method are joined; those of the second, the first after the reference, tell budgets.
    """
    if not rows:
        raise InputError("a figure of throughput needs at least one row")
    batches = parts_of(sorted(rows, key=lambda row: row["batch"]), "batch")
    methods = distinct(rows, "method")
    figure, grid, spare = panels(len(batches), title, width=3.9, height=3.7)
    both = [row[name] for row in rows for name in ("MAC ratio", "speed-up")]
    least, most = min(both), max(both)
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if least / 1.5 <= tick <= most * 1.5]
    for axes, (batch, part) in zip(grid, batches.items(), strict=True):
        axes.plot([least, most], [least, most], color="0.75", linewidth=1, zorder=0)
        lines = []
        for number, method in enumerate(methods):
            points = sorted((row for row in part if row["method"] == method), key=lambda row: row["MAC ratio"])
            x, y = ([row[name] for row in points] for name in ("MAC ratio", "speed-up"))
            marker = MARKERS[number % len(MARKERS)]
            lines += axes.plot(x, y, marker=marker, markersize=5, linewidth=1.2, label=method)
            for row, place in zip(points, zip(x, y, strict=True), strict=True):
                if method == methods[min(1, len(methods) - 1)]:
                    axes.annotate(str(row["budget"]), place, (-4, 5), textcoords="offset points", ha="right", size=8)
        axes.set(xscale="log", yscale="log", xlabel="MAC ratio", title=f"batch {batch}")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, labels=[f"{tick:g}×" for tick in ticks])
            axis.set_ticks([], minor=True)
    for axes in grid[:: columns_of(len(batches))]:
        axes.set_ylabel("measured speed-up")
    legend(figure, lines, spare)
    return figure
