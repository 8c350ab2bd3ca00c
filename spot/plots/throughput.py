"""Measured speed-up against the ratio of multiply-adds: on the diagonal, arithmetic is all that counts."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from spot.errors import InputError
from spot.plots.accuracy import accuracy
from spot.plots.layout import Row, distinct


def throughput(rows: Sequence[Row], title: str = "") -> Figure:
    """One panel per batch size.

    rows have `method`, `batch`, `budget`, `MAC ratio` and `speed-up`, as `spot bench` writes them.
    Points of one method are joined; those of the second, the first after the reference, tell budgets.
    """
    if not rows:
        raise InputError("a figure of throughput needs at least one row")
    named = [{**row, "panel": f"batch {row['batch']}"} for row in sorted(rows, key=lambda row: row["batch"])]
    told = distinct(rows, "method")[:2][-1]
    figure = accuracy(
        named, line="method", across="MAC ratio", value="speed-up", panel="panel", across_label="MAC ratio",
        label="measured speed-up", title=title, numbers=(told, "budget"),
    )  # fmt: skip
    both = [row[name] for row in rows for name in ("MAC ratio", "speed-up")]
    least, most = min(both), max(both)
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if least / 1.5 <= tick <= most * 1.5]
    for axes in (axes for axes in figure.axes if axes.lines):
        axes.plot([least, most], [least, most], color="0.75", linewidth=1, zorder=0)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, labels=[f"{tick:g}×" for tick in ticks])
            axis.set_ticks([], minor=True)
    return figure
