"""A matrix of what each source is worth to each target, as a heat map (paper, table of transfer)."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from spot.errors import InputError
from spot.plots.bars import distinct


def matrix(
    rows: Sequence[Mapping[str, Any]],
    *,
    source: str = "source",
    target: str = "target",
    value: str = "delta",
    low: str | None = "low",
    high: str | None = "high",
    paper: str | None = None,
    label: str = "change in top-1, percentage points",
    title: str = "",
    digits: int = 1,
) -> Figure:
    """A cell per pair: its value with sign and interval; red lowers, green raises.

    Args:
        rows: one per pair; a pair without a row stays empty.
        source, target: the columns that say which row and which column of the matrix it fills.
        low, high: the ends of its interval; paper: the paper's value, in a line of its own.
    """
    if not rows:
        raise InputError("a matrix needs at least one pair")
    sources = distinct(rows, source)
    read = distinct(rows, target)
    targets = [name for name in sources if name in read] + [name for name in read if name not in sources]
    most = max(max((abs(row[value]) for row in rows if row.get(value) is not None), default=1.0), 1e-9)
    cells = [[float("nan")] * len(targets) for _ in sources]
    for row in rows:
        if row.get(value) is not None:
            cells[sources.index(str(row[source]))][targets.index(str(row[target]))] = float(row[value])
    size = (2.6 + 1.45 * len(targets), 1.6 + 0.95 * len(sources))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots()
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
    axes.set(xlabel="read by", ylabel="found with")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks([index - 0.5 for index in range(1, len(targets))], minor=True)
    axes.set_yticks([index - 0.5 for index in range(1, len(sources))], minor=True)
    axes.grid(which="minor", color="white", linewidth=3)
    axes.tick_params(which="minor", length=0)
    figure.colorbar(shown, ax=axes, label=label, shrink=0.9)
    figure.suptitle(title, fontsize=11)
    return figure
