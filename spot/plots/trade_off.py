"""Accuracy against throughput, with the oracle's ceiling and the gap below it (paper, figure of throughput)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from spot.plots.accuracy import accuracy
from spot.plots.layout import Row, parts_of

CEILING, GAP = "#f9d5d5", "#fdf3d0"  # above what an oracle reaches; between it and what is reached


def trade_off(
    rows: Sequence[Row],
    *,
    oracle: str = "",
    reached: str = "",
    panel: str | None = None,
    across_label: str = "throughput, relative to the dense model",
    title: str = "",
) -> Figure:
    """A line per method, with the numbers of tokens of the one reached.

    Args:
        rows: `method`, `tokens`, `speed-up`, `top1` and perhaps `low` and `high`, in percent.
        oracle: how the name of the method begins above which is the ceiling; reached: the one that the gap is
            measured from.
        panel: a column whose values get a panel each.
    """
    figure = accuracy(
        rows, line="method", across="speed-up", value="top1", panel=panel, across_label=across_label, title=title,
        log=False, numbers=(reached, "tokens"),
    )  # fmt: skip
    right = 1.04 * max(row["speed-up"] for row in rows)
    bottom = max(0.0, min(row.get("low") or row["top1"] for row in rows) - 5)
    drawn = [axes for axes in figure.axes if axes.lines]
    for axes, part in zip(drawn, parts_of(rows, panel).values(), strict=True):
        axes.set(xlim=(0, right), ylim=(bottom, 102))
        curves = parts_of(sorted(part, key=lambda row: row["speed-up"]), "method")
        best = next((name for name in curves if oracle and name.startswith(oracle)), "")
        above, below = (edge(curves[name], right) if name in curves else None for name in (best, reached))
        if above:
            axes.fill_between(*above, 102, color=CEILING, linewidth=0, zorder=0)
            axes.text(0.97 * right, 101, "ceiling", ha="right", va="top", color="#b55")
        if above and below:
            # Between two curves of different points, each continued level at both ends.
            axes.fill_between(*above, bottom, color=GAP, linewidth=0, zorder=0)
            axes.fill_between(*below, bottom, color="white", linewidth=0, zorder=0)
            axes.text(0.97 * right, (above[1][-1] + below[1][-1]) / 2, "gap", ha="right", va="center", color="#997")
    return figure


def edge(points: Sequence[Row], right: float) -> tuple[list[float], list[float]]:
    """A curve from 0 to the right end, level beyond its first and last point."""
    x, y = [row["speed-up"] for row in points], [row["top1"] for row in points]
    return [0.0, *x, right], [y[0], *y, y[-1]]
