"""A matrix of what each source is worth to each target, as a heat map (paper, table of transfer)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from spot.errors import InputError
from spot.plots.layout import PlainFigure, Row, distinct, parts_of, wrapped


def matrix(rows: Sequence[Row], *, panel: str | None = None, title: str = "") -> Figure:
    """A cell per pair: the change with sign and interval; pink lowers, green raises.

    Args:
        rows: one per pair, with `source`, `target`, `delta` and perhaps `delta_low` and `delta_high`;
            a pair without a row stays empty.
        panel: a column whose values get a matrix each, side by side, in the same colours.
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
        # Lightened at the ends by a wider range, so that the text stays readable.
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
