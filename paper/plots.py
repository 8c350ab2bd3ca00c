"""Plots of studies: grouped bars with intervals, a matrix of sources and targets, and accuracy against speed."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spot.errors import InputError
from spot.plots.accuracy import accuracy
from spot.plots.layout import PlainFigure, Row, colours_of, distinct, interval, legend, parts_of, quiet, wrapped

WIDTH = 0.84  # of a group, as a share of its spacing
NUMBERED = 36  # the largest number of bars in a panel with space for their values
CEILING, GAP = "#f9d5d5", "#fdf3d0"  # above the oracle; between the oracle and the best method
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
    digits: int = 1,
) -> Figure:
    """A bar per row, side by side in groups.

    Args:
        rows: a table; each row with a value is one bar.
        group, bar: the columns with a bar's group and its name within the group.
        value: the column with its height; low and high are the ends of its interval.
        panel: a column with one panel for each value, one above the other.
        label: of the vertical axis.
        digits: number of decimals on the bars.
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
                    axes.annotate(f"{height:.{digits}f}", (place, end), (0, off), **about)
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


def matrix(rows: Sequence[Row], *, panel: str | None = None, title: str = "") -> Figure:
    """A cell per pair: the change with sign and interval; pink is a decrease, green an increase.

    Args:
        rows: one per pair, with `source`, `target`, `delta` and perhaps `delta_low` and `delta_high`;
            a pair without a row stays empty.
        panel: a column with one matrix for each value, side by side, with the same colour scale.
    """
    if not rows:
        raise InputError("a matrix needs at least one pair")
    rows = [row for row in rows if row.get("delta") is not None]
    most = max([abs(row["delta"]) for row in rows], default=1.0) or 1.0
    parts = parts_of(rows, panel)
    widths = [1.0 + 1.45 * len(distinct(part, "target")) for part in parts.values()]
    height = max(len(distinct(part, "source")) for part in parts.values())
    figure = PlainFigure(1.6 + sum(widths), 1.6 + 0.95 * height)
    grid = figure.subplots(1, len(parts), squeeze=False, width_ratios=widths)[0]
    for axes, (name, part) in zip(grid, parts.items(), strict=True):
        sources, others = distinct(part, "source"), distinct(part, "target")
        targets = [each for each in sources if each in others] + [each for each in others if each not in sources]
        cells = [[float("nan")] * len(targets) for _ in sources]
        for row in part:
            y, x = sources.index(str(row["source"])), targets.index(str(row["target"]))
            cells[y][x] = float(row["delta"])
            ends = [row.get("delta_low"), row.get("delta_high")]
            span = "" if None in ends else " to ".join(f"{end:+.1f}" for end in ends)
            common = {"textcoords": "offset points", "ha": "center", "va": "center"}
            axes.annotate(f"{row['delta']:+.1f}", (x, y), (0, 5 if span else 0), size=11, weight="bold", **common)
            axes.annotate(span, (x, y), (0, -8), size=7, **common)
        # A wider range lightens the colours at its ends, so that the text stays readable.
        shown = axes.imshow(cells, cmap="PiYG", vmin=-1.5 * most, vmax=1.5 * most, aspect="auto")
        axes.set_facecolor("0.93")
        axes.set_xticks(range(len(targets)), [wrapped(each, 16) for each in targets])
        axes.set_yticks(range(len(sources)), sources)
        axes.set_xticks([index - 0.5 for index in range(1, len(targets))], minor=True)
        axes.set_yticks([index - 0.5 for index in range(1, len(sources))], minor=True)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        axes.grid(which="minor", color="white", linewidth=3)
        axes.set_xlabel("used by")
        axes.set_title(name, fontsize=10)
    grid[0].set_ylabel("searched with")
    figure.colorbar(shown, ax=list(grid), label="change in top-1, percentage points", shrink=0.9)
    figure.suptitle(title, fontsize=11)
    return figure


def trade_off(
    rows: Sequence[Row],
    *,
    oracle: str = "",
    reached: str = "",
    panel: str | None = None,
    across_label: str = "throughput, relative to the dense model",
    title: str = "",
) -> Figure:
    """A line per method, with the numbers of tokens on the line of `reached`.

    Args:
        rows: `method`, `tokens`, `speed-up`, `top1` and perhaps `low` and `high`, in percent.
        oracle: prefix of the name of the method that is the ceiling; reached: the method below the gap to
            the oracle.
        panel: a column with one panel for each value.
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
            # Between two curves with different points, each extended horizontally at both ends.
            axes.fill_between(*above, bottom, color=GAP, linewidth=0, zorder=0)
            axes.fill_between(*below, bottom, color="white", linewidth=0, zorder=0)
            axes.text(0.97 * right, (above[1][-1] + below[1][-1]) / 2, "gap", ha="right", va="center", color="#997")
    return figure


def edge(points: Sequence[Row], right: float) -> tuple[list[float], list[float]]:
    """A curve from 0 to the right end, horizontal before its first and after its last point."""
    x, y = [row["speed-up"] for row in points], [row["top1"] for row in points]
    return [0.0, *x, right], [y[0], *y, y[-1]]
