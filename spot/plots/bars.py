"""Bars in groups, with intervals as whiskers and the paper's value as a mark beside ours."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spot.errors import InputError
from spot.plots.palette import palette

Row = Mapping[str, Any]

WIDTH = 0.84  # of a group, of the room it has
NUMBERED = 36  # bars of a panel that still leave room for their values


def grouped_bars(
    rows: Sequence[Row],
    *,
    group: str,
    bar: str,
    value: str,
    low: str | None = None,
    high: str | None = None,
    paper: str | None = None,
    panel: str | None = None,
    label: str = "",
    title: str = "",
    digits: int = 1,
) -> Figure:
    """A bar per row, side by side in groups.

    Args:
        rows: a table; each row is one bar. A row without a value leaves its place empty.
        group, bar: the columns that say which group a bar stands in and which of its bars it is.
        value: its height; low and high are the ends of its interval.
        paper: a column with the paper's value, drawn as a diamond; None where the paper has none.
        panel: a column whose values get a panel each, one above the other.
        label: of the vertical axis.
        digits: of the numbers on the bars.
    """
    if not rows:
        raise InputError("a figure of bars needs at least one row")
    names = distinct(rows, bar)
    colours = dict(zip(names, palette(len(names)), strict=True))
    panels = distinct(rows, panel) if panel else [None]
    widest = max(len(distinct(_of(rows, panel, each), group)) for each in panels)
    width = max(5.5, min(16.0, 1.6 + widest * (0.42 * len(names) + 0.35)))
    figure = Figure(figsize=(width, 0.6 + 2.9 * len(panels)), dpi=150, layout="constrained")
    for axes, each in zip(figure.subplots(len(panels), 1, sharey=True, squeeze=False)[:, 0], panels, strict=True):
        part = _of(rows, panel, each)
        _draw(axes, part, colours, group, bar, value, low, high, paper, digits)
        axes.set(ylabel=label, title="" if each is None else str(each))
        axes.title.set_fontsize(10)
    handles: list[Any] = [Line2D([], [], color=colours[name], linewidth=7, label=name) for name in names]
    if paper and any(row.get(paper) is not None for row in rows):
        handles.append(_paper_mark())
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw(
    axes: Axes,
    rows: Sequence[Row],
    colours: Mapping[str, Any],
    group: str,
    bar: str,
    value: str,
    low: str | None,
    high: str | None,
    paper: str | None,
    digits: int,
) -> None:
    groups = distinct(rows, group)
    present = [name for name in colours if any(str(row[bar]) == name for row in rows)]
    each = WIDTH / len(present)
    numbered = len(rows) <= NUMBERED
    for row in rows:
        if row.get(value) is None:
            continue
        place = groups.index(str(row[group])) - WIDTH / 2 + (present.index(str(row[bar])) + 0.5) * each
        height, colour = float(row[value]), colours[str(row[bar])]
        axes.bar(place, height, width=0.92 * each, color=colour, alpha=0.85)
        top = bottom = height
        if low and high and row.get(low) is not None and row.get(high) is not None:
            bottom, top = float(row[low]), float(row[high])
            span = [[max(0.0, height - bottom)], [max(0.0, top - height)]]
            axes.errorbar(place, height, yerr=span, fmt="none", ecolor="0.25", elinewidth=1, capsize=2)
        if numbered:
            down = height < 0
            axes.annotate(
                f"{height:.{digits}f}",
                (place, min(bottom, 0.0) if down else max(top, 0.0)),
                (0, -3 if down else 3),
                textcoords="offset points",
                ha="center",
                va="top" if down else "bottom",
                fontsize=7,
            )
        if paper and row.get(paper) is not None:
            axes.plot(place, float(row[paper]), **MARK)
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set_xticks(range(len(groups)), [fill(name, 18) for name in groups], fontsize=9)
    axes.set_xlim(-0.5 - 0.05, len(groups) - 0.5 + 0.05)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


MARK: dict[str, Any] = {
    "marker": "D",
    "markersize": 5,
    "markerfacecolor": "white",
    "markeredgecolor": "black",
    "linestyle": "none",
    "zorder": 5,
}


def _paper_mark() -> Line2D:
    return Line2D([], [], label="the paper", **MARK)


def _of(rows: Sequence[Row], column: str | None, value: str | None) -> list[Row]:
    return [row for row in rows if column is None or str(row[column]) == value]


def distinct(rows: Sequence[Row], column: str) -> list[str]:
    """The values of a column, as text, in the order in which they first come."""
    return list(dict.fromkeys(str(row[column]) for row in rows))
