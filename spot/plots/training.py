"""The paper's retrofit plot: training and validation accuracy by epoch (appendix, retrofitting ablations)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spot.atomic import whole


def plot_log(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw a training log to a file: accuracy by epoch where there is any, otherwise the loss.

    rows have `epoch`, `loss`, perhaps `train_top1`, and percentages named `val_` and a token count.
    """
    curves = [("train", "train_top1")]
    curves += [(f"val, {name[4:]} tokens", name) for row in rows[:1] for name in row if name[:4] == "val_"]
    curves = [(label, name) for label, name in curves if any(row.get(name) is not None for row in rows)]
    accuracy = bool(curves)
    if not accuracy:
        curves = [("train", "loss")]
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for label, name in curves:
        points = [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.6, marker="o" if len(points) < 12 else "")
    axes.set(xlabel="Epoch", ylabel="Accuracy (%)" if accuracy else "Loss", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    with whole(path) as temporary:
        figure.savefig(temporary, dpi=150)
