"""Measured speed-up against the ratio of multiply-adds: on the diagonal, arithmetic is all that counts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from spot.store import whole

MARKERS = "osD^vP*X"


def throughput(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw one panel per batch size to a file.

    rows have `method`, `batch`, `budget`, `MAC ratio` and `speed-up`, as `spot bench` writes them.
    Points of one method are joined; those of the second, the first after the reference, tell budgets.
    """
    batches = sorted({row["batch"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(1.2 + 3.9 * len(batches), 3.9), layout="constrained")
    panels = figure.subplots(1, len(batches), sharex=True, sharey=True, squeeze=False)[0]
    most = max(max(row["MAC ratio"], row["speed-up"]) for row in rows)
    least = min(min(row["MAC ratio"], row["speed-up"]) for row in rows)
    for axes, batch in zip(panels, batches, strict=True):
        axes.plot([least, most], [least, most], color="0.75", linewidth=1, zorder=0)
        for number, method in enumerate(methods):
            points = [row for row in rows if row["batch"] == batch and row["method"] == method]
            points.sort(key=lambda row: row["MAC ratio"])
            x, y = ([row[name] for row in points] for name in ("MAC ratio", "speed-up"))
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(x, y, marker=marker, markersize=5, linewidth=1.2, label=method)
            for row in points if method == methods[min(1, len(methods) - 1)] else ():
                place = (row["MAC ratio"], row["speed-up"])
                axes.annotate(f"{row['budget']}", place, (-4, 5), textcoords="offset points", ha="right", fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="MAC ratio", title=f"batch {batch}")
        ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if least / 1.5 <= tick <= most * 1.5]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, labels=[f"{tick:g}×" for tick in ticks])
            axis.set_ticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("measured speed-up")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    with whole(path) as temporary:
        figure.savefig(temporary, dpi=150)
