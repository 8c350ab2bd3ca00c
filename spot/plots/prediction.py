"""What the model saw of an image, and what it made of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from spot.plots.placements import TOWARDS, draw_image, draw_windows, seen
from spot.store import whole


def prediction(
    image: Tensor,
    positions: Tensor,
    window: int,
    rows: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    title: str = "",
) -> None:
    """Save an image with its windows, the same with all else darkened, and the classes.

    Args:
        image: (3, H, W) in [0, 1].
        positions: (N, 2), (y, x), fraction of height and width: the windows' centres.
        window: K, a window's side in pixels.
        rows: "class" and "probability" (in percent), best first.
        path: the picture, a .png.
    """
    height, width = image.shape[-2:]
    figure = Figure(figsize=(11, 3 * height / width + 0.7), layout="constrained")
    placed, visible, bars = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
    shown = seen(image, positions, window)
    draw_image(placed, image)
    draw_windows(placed, image, positions, window, TOWARDS(1.0))
    placed.set_title(f"{len(positions)} windows of {window} × {window}", fontsize=10)
    draw_image(visible, image, shown)
    visible.set_title(f"the model saw {shown.mean().item():.0%} of the pixels", fontsize=10)

    percent = [float(row["probability"]) for row in rows]
    bars.barh(range(len(rows)), percent, color=TOWARDS(0.35), height=0.35)
    for index, (row, value) in enumerate(zip(rows, percent, strict=True)):
        name = shorten(str(row["class"]), 34, placeholder="…")
        bars.text(0, index - 0.22, f"{name}, {value:.1f} %", va="bottom", fontsize=9)
    bars.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.8), xlabel="probability, %", yticks=[])
    bars.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    with whole(path) as temporary:
        figure.savefig(temporary, dpi=130)
