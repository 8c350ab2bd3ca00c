"""Accuracy against throughput, with the oracle's ceiling and the gap below it (paper, figure of throughput)."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spot.errors import InputError
from spot.plots.bars import distinct
from spot.plots.palette import palette
from spot.plots.panels import columns_of, panels_of

CEILING, GAP = "#f9d5d5", "#fdf3d0"  # above what an oracle reaches; between it and what is reached


def trade_off(
    rows: Sequence[Mapping[str, Any]],
    *,
    line: str = "method",
    across: str = "speed-up",
    value: str = "top1",
    low: str = "low",
    high: str = "high",
    tokens: str = "tokens",
    oracle: str | None = None,
    reached: str | None = None,
    panel: str | None = None,
    across_label: str = "throughput, relative to the dense model",
    title: str = "",
) -> Figure:
    """A line per method, a disc per budget as large as its tokens.

    Args:
        rows: a table with the columns named by the other arguments; value, low and high in percent.
        oracle: the line above which is the ceiling; reached: the one that the gap is measured from.
        panel: a column whose values get a panel each, side by side.
    """
    if not rows:
        raise InputError("a figure of accuracy against throughput needs at least one row")
    names, panels = distinct(rows, line), distinct(rows, panel) if panel else [None]
    colours = dict(zip(names, palette(len(names)), strict=True))
    most = max(row[tokens] for row in rows)
    columns = columns_of(len(panels))
    size = (4.6 * columns + 1.9, 0.3 + 3.9 * -(-len(panels) // columns))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = panels_of(figure, len(panels))
    right = 1.04 * max(row[across] for row in rows)
    bottom = max(0.0, min(row.get(low) or row[value] for row in rows) - 5)
    for axes, each in zip(grid, panels, strict=True):
        part = [row for row in rows if panel is None or str(row[panel]) == each]
        curves = {
            name: sorted((row for row in part if str(row[line]) == name), key=lambda row: row[across])
            for name in distinct(part, line)
        }
        edges = {name: _edge(curves[name], across, value, right) for name in (oracle, reached) if name in curves}
        if oracle in edges:
            x, y = edges[oracle]
            axes.fill_between(x, y, 102, color=CEILING, linewidth=0, zorder=0)
            axes.annotate(
                "ceiling", (0.97, 0.985), xycoords="axes fraction", ha="right", va="top", color="#b55", fontsize=9
            )
            if reached in edges:
                # Between two curves of different points, each continued level at both ends.
                axes.fill_between(*edges[oracle], bottom, color=GAP, linewidth=0, zorder=0)
                axes.fill_between(*edges[reached], bottom, color="white", linewidth=0, zorder=0)
        for name, points in curves.items():
            x, y = ([row[column] for row in points] for column in (across, value))
            style = ":" if name == oracle else "-"
            axes.plot(x, y, color=colours[name], linestyle=style, linewidth=1.4, zorder=2)
            sizes = [12 + 110 * row[tokens] / most for row in points]
            axes.scatter(x, y, s=sizes, facecolor=[(*colours[name][:3], 0.3)], edgecolor=[colours[name]], zorder=3)
            for row in points:
                if row.get(low) is not None and row.get(high) is not None:
                    axes.plot([row[across]] * 2, [row[low], row[high]], color=colours[name], linewidth=1, zorder=2)
        told = curves.get(str(reached), next(iter(curves.values())))
        for row in told:
            axes.annotate(
                f"{row[tokens]}", (row[across], row[value]), (-6, -5), textcoords="offset points",
                ha="right", va="top", fontsize=8,
            )  # fmt: skip
        axes.set(xlabel=across_label, xlim=(0, right), ylim=(bottom, 102), title="" if each is None else str(each))
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("top-1 accuracy, %")
    handles: list[Any] = [
        Line2D([], [], color=colours[name], marker="o", linestyle=":" if name == oracle else "-", label=name)
        for name in names
    ]
    if oracle in names and reached in names:
        handles.append(Line2D([], [], color=GAP, linewidth=7, label="gap"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    figure.text(0.995, 0.01, "numbers: tokens", ha="right", fontsize=8, color="0.35")
    figure.suptitle(title, fontsize=11)
    return figure


def _edge(
    points: Sequence[Mapping[str, Any]], across: str, value: str, right: float
) -> tuple[list[float], list[float]]:
    """A curve from 0 to the right end, level beyond its first and last point."""
    x, y = [row[across] for row in points], [row[value] for row in points]
    return [0.0, *x, right], [y[0], *y, y[-1]]
