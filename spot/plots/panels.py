"""Panels of one figure: how many stand beside each other."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def panels_of(figure: Figure, count: int) -> list[Axes]:
    """So many panels on common axes, in rows of `columns_of(count)`; each shows its own ticks."""
    columns = columns_of(count)
    rows = -(-count // columns)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for spare in grid[count:]:
        spare.set_visible(False)
    for axes in grid[:count]:
        axes.tick_params(labelbottom=True)  # a panel below may be missing
    return grid[:count]


def columns_of(count: int) -> int:
    """Up to three panels stand in one row, four in a square."""
    return 2 if count == 4 else min(3, count)
