"""The plot of most studies: bars in groups, with intervals."""

import re
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spot.errors import InputError
from spot.plots.layout import PlainFigure, Row, colours_of, distinct, interval, legend, parts_of, quiet

WIDTH = 0.84  # of a group, as a share of its spacing
NUMBERED = 36  # the largest number of bars in a panel with space for their values
LETTER = 0.085  # inches per letter of a group's name


def grouped_bars(
    rows: Sequence[Row],
    *,
    group: str,
    bar: str,
    value: str = "value",
    low: str = "low",
    high: str = "high",
    panel: str | None = None,
    label: str = "",
    title: str = "",
) -> Figure:
    """A bar per row, side by side in groups.

    Args:
        rows: a table; each row with a value is one bar.
        group, bar: the columns with a bar's group and its name within the group.
        value: the column with its height; low and high are the ends of its interval.
        panel: a column with one panel for each value, one above the other.
        label: of the vertical axis.
    """
    rows = [row for row in rows if row.get(value) is not None]
    if not rows:
        raise InputError("a figure of bars needs at least one row")
    colours, panels = colours_of(distinct(rows, bar)), parts_of(rows, panel)
    widest = max(len(distinct(part, group)) for part in panels.values())
    room = 0.42 * len(colours) + 0.35  # inches of a group
    letters = max(8, int(min(room, 14.4 / widest) / LETTER))
    figure = PlainFigure(max(5.5, min(16.0, 1.6 + widest * room)), 0.6 + 2.9 * len(panels))
    grid = figure.subplots(len(panels), 1, sharey=True, squeeze=False)[:, 0]
    for axes, (name, part) in zip(grid, panels.items(), strict=True):
        groups, each = parts_of(part, group), WIDTH / len(distinct(part, bar))
        for middle, members in enumerate(groups.values()):
            here = [known for known in colours if known in distinct(members, bar)]
            for row in members:  # the bars of an incomplete group are centred
                place = middle + (here.index(str(row[bar])) - (len(here) - 1) / 2) * each
                height = float(row[value])
                axes.bar(place, height, width=0.92 * each, color=colours[str(row[bar])], alpha=0.85)
                interval(axes, place, row, value, low, high, "0.25")
                if len(part) <= NUMBERED:
                    ends = [0.0, height, *(float(row[end]) for end in (low, high) if row.get(end) is not None)]
                    end, off, side = (min(ends), -3, "top") if height < 0 else (max(ends), 3, "bottom")
                    about = {"textcoords": "offset points", "ha": "center", "va": side, "size": 7}
                    axes.annotate(f"{height:.1f}", (place, end), (0, off), **about)
        axes.axhline(0, color="0.3", linewidth=0.8)
        axes.set_xlim(-0.55, len(groups) - 0.45)
        axes.margins(y=0.12)
        quiet(axes, "y")
        axes.set_xticks(range(len(groups)), [wrapped(known, letters) for known in groups], fontsize=9)
        axes.set_ylabel(label)
        axes.set_title(name, fontsize=10)
    legend(figure, [Line2D([], [], color=colour, linewidth=7, label=name) for name, colour in colours.items()])
    figure.suptitle(title, fontsize=11)
    return figure


def wrapped(name: str, letters: int) -> str:
    """Wrap a name into lines of about `letters` characters: between words, after `_` or before `+`."""
    lines = [""]
    for piece in re.findall(r"\+?[^\s_+]*[\s_]*", name):
        if piece and lines[-1] and len((lines[-1] + piece).rstrip()) > letters:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
