"""Shared parts of figures: literal text, a grid of panels, one legend, and distinct colours and markers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

Row = Mapping[str, Any]
Colour = tuple[float, ...]

MARKERS = "osD^vPX<>h*p"
# ColorBrewer's Dark2, as in the paper, and four more distinct colours.
COLOURS = [*matplotlib.colormaps["Dark2"](range(8)), "#08519c", "#000000", "#e31a1c", "#6baed6"]


class PlainFigure(Figure):
    """A figure that prints text literally: a file name with two $ signs is not a formula."""

    def __init__(self, width: float, height: float, dpi: int = 150) -> None:
        super().__init__(figsize=(width, height), dpi=dpi, layout="constrained")

    def draw(self, renderer: RendererBase) -> None:
        for text in self.findobj(Text):
            text.set_parse_math(False)
        super().draw(renderer)


def panels(count: int, title: str, label: str, *, sharex: bool = True) -> tuple[PlainFigure, list[Axes]]:
    """A figure with `count` panels in up to three columns. They share the vertical axis, whose label is `label`."""
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    figure = PlainFigure(4.4 * columns + 1.8, 3.6 * rows + 0.4)
    grid = figure.subplots(rows, columns, sharex=sharex, sharey=True, squeeze=False).flatten().tolist()
    for spare in grid[count:]:
        spare.remove()
    for axes in grid[:count]:
        axes.tick_params(labelbottom=True)  # the panel below may be empty
        quiet(axes)
    for axes in grid[:count:columns]:
        axes.set_ylabel(label)
    figure.suptitle(title, fontsize=11)
    return figure, grid[:count]


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Draw one legend at the right, unless there is only one line."""
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)


def quiet(axes: Axes, lines: Literal["both", "y"] = "both") -> None:
    """Draw a pale grid behind the data, and remove the frame at the top and right."""
    axes.grid(axis=lines, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def interval(axes: Axes, x: float, row: Row, value: str, low: str, high: str, colour: Any) -> None:
    """Draw an error bar from low to high if the row has both."""
    if row.get(low) is not None and row.get(high) is not None:
        span = [[max(0.0, row[value] - row[low])], [max(0.0, row[high] - row[value])]]
        axes.errorbar(x, row[value], yerr=span, fmt="none", ecolor=colour, elinewidth=1, capsize=2, alpha=0.7)


def colours_of(names: Sequence[str]) -> dict[str, Colour]:
    """A colour for each name; the first twelve are distinct."""
    return {name: to_rgba(COLOURS[index % len(COLOURS)]) for index, name in enumerate(names)}


def distinct(rows: Sequence[Row], column: str) -> list[str]:
    """The distinct values of a column as text, in order of first appearance."""
    return list(dict.fromkeys(str(row[column]) for row in rows))


def parts_of(rows: Sequence[Row], column: str | None) -> dict[str, list[Row]]:
    """Group rows by the value of a column. Without a column, one group has an empty name."""
    names = [""] if column is None else distinct(rows, column)
    return {name: [row for row in rows if column is None or str(row[column]) == name] for name in names}
