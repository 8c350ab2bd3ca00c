"""The paper's retrofit plot: training and validation accuracy by epoch (appendix, retrofitting ablations)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spot.errors import InputError
from spot.store import whole

Log = Sequence[Mapping[str, Any]]


def plot_log(rows: Log, path: str | Path, title: str = "") -> None:
    """Draw a training log to a file: accuracy by epoch where there is any, otherwise the loss.

    rows have `epoch`, `loss`, perhaps `train_top1`, and percentages named `val_` and a token count.
    """
    with whole(path) as temporary:
        logs_figure({title: rows}).savefig(temporary, dpi=150)


def logs_figure(logs: Mapping[str, Log], title: str = "") -> Figure:
    """Training logs, a panel each under its name; see `plot_log` for their rows.

    Where a row also has `val_N_low` and `val_N_high`, the interval is drawn as a band.
    """
    if not logs or not all(logs.values()):
        raise InputError("a figure of training needs a log with at least one row")
    figure = Figure(figsize=(6.4, 0.2 + 3.0 * len(logs)), dpi=150, layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(len(logs), 1, squeeze=False)[:, 0], logs.items(), strict=True):
        draw_log(axes, rows)
        axes.set_title(name)
    figure.suptitle(title, fontsize=11)
    return figure


def draw_log(axes: Axes, rows: Log) -> None:
    """One log on axes."""
    found = dict.fromkeys(name for row in rows for name in row)
    curves = [("train", "train_top1")]
    curves += [(f"val, {name[4:]} tokens", name) for name in found if name[:4] == "val_" and name[4:].isdecimal()]
    curves = [(label, name) for label, name in curves if any(row.get(name) is not None for row in rows)]
    accuracy = bool(curves)
    if not accuracy:
        curves = [("train", "loss")]
    for label, name in curves:
        points = [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
        line = axes.plot(*zip(*points, strict=True), label=label, linewidth=1.6, marker="o" if len(points) < 12 else "")
        band = [(row["epoch"], row[f"{name}_low"], row[f"{name}_high"]) for row in rows if f"{name}_low" in row]
        if band:
            epochs, low, high = zip(*band, strict=True)
            axes.fill_between(epochs, low, high, color=line[0].get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="Epoch", ylabel="Accuracy (%)" if accuracy else "Loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
