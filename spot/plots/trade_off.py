"""Accuracy against throughput, with the oracle's ceiling and the gap below it (paper, figure of throughput)."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spot.errors import InputError
from spot.plots.layout import MARKERS, Row, colours_of, columns_of, distinct, legend, panels, parts_of

CEILING, GAP = "#f9d5d5", "#fdf3d0"  # above what an oracle reaches; between it and what is reached


def trade_off(
    rows: Sequence[Row],
    *,
    oracle: str | None = None,
    reached: str | None = None,
    panel: str | None = None,
    across_label: str = "throughput, relative to the dense model",
    title: str = "",
) -> Figure:
    """A line per method, a mark per budget as large as its tokens.

    Args:
        rows: `method`, `tokens`, `speed-up`, `top1` and perhaps `low` and `high`, in percent.
        oracle: the method above which is the ceiling; reached: the one that the gap is measured from.
        panel: a column whose values get a panel each.
    """
    if not rows:
        raise InputError("a figure of accuracy against throughput needs at least one row")
    names, parts = distinct(rows, "method"), parts_of(rows, panel)
    colours, markers = colours_of(names), dict(zip(names, MARKERS, strict=False))
    figure, grid, spare = panels(len(parts), title, width=4.6, height=3.9)
    most, right = max(row["tokens"] for row in rows), 1.04 * max(row["speed-up"] for row in rows)
    bottom = max(0.0, min(row.get("low") or row["top1"] for row in rows) - 5)
    for axes, (part_title, part) in zip(grid, parts.items(), strict=True):
        curves = parts_of(sorted(part, key=lambda row: row["speed-up"]), "method")
        edges = {name: _edge(curves[name], right) for name in (oracle, reached) if name in curves}
        if oracle in edges:
            axes.fill_between(*edges[oracle], 102, color=CEILING, linewidth=0, zorder=0)
            axes.annotate("ceiling", (0.97, 0.985), xycoords="axes fraction", ha="right", va="top", color="#b55")
            if reached in edges:
                # Between two curves of different points, each continued level at both ends.
                axes.fill_between(*edges[oracle], bottom, color=GAP, linewidth=0, zorder=0)
                axes.fill_between(*edges[reached], bottom, color="white", linewidth=0, zorder=0)
        for name, points in curves.items():
            x, y = ([row[column] for row in points] for column in ("speed-up", "top1"))
            axes.plot(x, y, color=colours[name], linestyle=":" if name == oracle else "-", linewidth=1.4, zorder=2)
            sizes, pale = [12 + 110 * row["tokens"] / most for row in points], (*colours[name][:3], 0.3)
            axes.scatter(x, y, sizes, facecolor=[pale], edgecolor=[colours[name]], marker=markers[name], zorder=3)
            for row in points:
                if row.get("low") is not None and row.get("high") is not None:
                    axes.vlines(row["speed-up"], row["low"], row["high"], colors=colours[name], linewidth=1, zorder=2)
        for row in curves.get(str(reached), next(iter(curves.values()))):
            place = (row["speed-up"], row["top1"])
            axes.annotate(str(row["tokens"]), place, (-6, -5), textcoords="offset points", ha="right", va="top", size=8)
        axes.set(xlabel=across_label, xlim=(0, right), ylim=(bottom, 102))
        axes.set_title(part_title, fontsize=10)
    for axes in grid[:: columns_of(len(parts))]:
        axes.set_ylabel("top-1 accuracy, %")
    handles: list[Any] = [
        Line2D([], [], color=colours[name], marker=markers[name], linestyle=":" if name == oracle else "-", label=name)
        for name in names
    ]
    handles += [Line2D([], [], color=GAP, linewidth=7, label="gap")] if {oracle, reached} <= set(names) else []
    legend(figure, [*handles, Line2D([], [], linestyle="none", label="numbers: tokens")], spare)
    return figure


def _edge(points: Sequence[Row], right: float) -> tuple[list[float], list[float]]:
    """A curve from 0 to the right end, level beyond its first and last point."""
    x, y = [row["speed-up"] for row in points], [row["top1"] for row in points]
    return [0.0, *x, right], [y[0], *y, y[-1]]
