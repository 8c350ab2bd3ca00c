"""A matrix of what each source is worth to each target, as a heat map (paper, table of transfer)."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spot.errors import InputError
from spot.plots.bars import distinct

Row = Mapping[str, Any]


def matrix(
    rows: Sequence[Row],
    *,
    source: str = "source",
    target: str = "target",
    value: str = "delta",
    low: str | None = "low",
    high: str | None = "high",
    paper: str | None = None,
    panel: str | None = None,
    label: str = "change in top-1, percentage points",
    title: str = "",
    digits: int = 1,
) -> Figure:
    """A cell per pair: its value with sign and interval; red lowers, green raises.

    Args:
        rows: one per pair; a pair without a row stays empty.
        source, target: the columns that say which row and which column of the matrix it fills.
        low, high: the ends of its interval; paper: the paper's value, in a line of its own.
        panel: a column whose values get a matrix each, side by side, in the same colours.
    """
    if not rows:
        raise InputError("a matrix needs at least one pair")
    most = max(max((abs(row[value]) for row in rows if row.get(value) is not None), default=1.0), 1e-9)
    parts = {each: [row for row in rows if panel is None or str(row[panel]) == each] for each in _panels(rows, panel)}
    widths = [1.0 + 1.45 * len(distinct(part, target)) for part in parts.values()]
    height = max(len(distinct(part, source)) for part in parts.values())
    figure = Figure(figsize=(1.6 + sum(widths), 1.6 + 0.95 * height), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(parts), squeeze=False, width_ratios=widths)[0]
    for axes, (name, part) in zip(panels, parts.items(), strict=True):
        shown = _draw(axes, part, source, target, value, low, high, paper, most, digits)
        axes.set_title(name or "", fontsize=10)
    panels[0].set_ylabel("found with")
    figure.colorbar(shown, ax=list(panels), label=label, shrink=0.9)
    figure.suptitle(title, fontsize=11)
    return figure


def _panels(rows: Sequence[Row], panel: str | None) -> Sequence[str | None]:
    return distinct(rows, panel) if panel else [None]


def _draw(
    axes: Axes,
    rows: Sequence[Row],
    source: str,
    target: str,
    value: str,
    low: str | None,
    high: str | None,
    paper: str | None,
    most: float,
    digits: int,
) -> Any:
    sources = distinct(rows, source)
    read = distinct(rows, target)
    targets = [name for name in sources if name in read] + [name for name in read if name not in sources]
    cells = [[float("nan")] * len(targets) for _ in sources]
    for row in rows:
        if row.get(value) is not None:
            cells[sources.index(str(row[source]))][targets.index(str(row[target]))] = float(row[value])
    axes.set_facecolor("0.93")
    # Lightened at the ends by a wider range, so that the text stays readable.
    shown = axes.imshow(cells, cmap="PiYG", vmin=-1.5 * most, vmax=1.5 * most, aspect="auto")
    for row in rows:
        if row.get(value) is None:
            continue
        lines = [f"{row[value]:+.{digits}f}"]
        if low and high and row.get(low) is not None and row.get(high) is not None:
            lines.append(f"{row[low]:+.{digits}f} to {row[high]:+.{digits}f}")
        if paper and row.get(paper) is not None:
            lines.append(f"paper {row[paper]:+.{digits}f}")
        place = (targets.index(str(row[target])), sources.index(str(row[source])))
        axes.annotate(lines[0], place, (0, 5 * len(lines[1:])), textcoords="offset points", ha="center", va="center",
                      fontsize=11, fontweight="bold")  # fmt: skip
        rest = "\n".join(lines[1:])
        axes.annotate(rest, place, (0, -3), textcoords="offset points", ha="center", va="top", fontsize=7)
    axes.set_xticks(range(len(targets)), targets)
    axes.set_yticks(range(len(sources)), sources)
    axes.set(xlabel="read by")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks([index - 0.5 for index in range(1, len(targets))], minor=True)
    axes.set_yticks([index - 0.5 for index in range(1, len(sources))], minor=True)
    axes.grid(which="minor", color="white", linewidth=3)
    axes.tick_params(which="minor", length=0)
    return shown
