"""The paper's retrofit plot: training and validation accuracy by epoch (appendix, retrofitting ablations)."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spot.errors import InputError
from spot.plots.layout import PlainFigure, Row, quiet


def training_logs(logs: Mapping[str, Sequence[Row]], title: str = "") -> Figure:
    """Plot training logs, one named panel each: accuracy by epoch, or the loss if there is no accuracy.

    Rows have `epoch`, `loss`, optionally `train_top1`, and accuracies in percent `val_N` for N tokens.
    If a row also has `val_N_low` and `val_N_high`, the interval is drawn as a band.
    """
    if not logs or not all(logs.values()):
        raise InputError("a figure of training needs a log with at least one row")
    figure = PlainFigure(6.4, 0.2 + 3.0 * len(logs))
    for axes, (name, rows) in zip(figure.subplots(len(logs), 1, squeeze=False)[:, 0], logs.items(), strict=True):
        _draw(axes, rows)
        axes.set_title(name)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw(axes: Axes, rows: Sequence[Row]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    curves = {"train_top1": "train"}
    curves |= {name: f"val, {name[4:]} tokens" for name in columns if name[:4] == "val_" and name[4:].isdecimal()}
    measured = {name: label for name, label in curves.items() if any(row.get(name) is not None for row in rows)}
    for name, label in (measured or {"loss": "train"}).items():
        points = [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
        line = axes.plot(*zip(*points, strict=True), label=label, linewidth=1.6, marker="o" if len(points) < 12 else "")
        band = [(row["epoch"], row[f"{name}_low"], row[f"{name}_high"]) for row in rows if f"{name}_low" in row]
        if band:
            epochs, low, high = zip(*band, strict=True)
            axes.fill_between(epochs, low, high, color=line[0].get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="Epoch", ylabel="Accuracy (%)" if measured else "Loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    quiet(axes)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
