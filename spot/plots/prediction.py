"""What the model saw of an image, and what it predicts."""

from collections.abc import Sequence
from textwrap import shorten

from matplotlib.figure import Figure
from torch import Tensor

from spot.plots.layout import PlainFigure, Row
from spot.plots.placements import TOWARDS, draw_image, draw_windows, seen, window_sides


def prediction(
    image: Tensor,
    positions: Tensor,
    window: int,
    rows: Sequence[Row],
    *,
    saliency: Tensor | None = None,
    title: str = "",
) -> Figure:
    """An image with its windows, the same with all else darkened, and the classes.

    Args:
        image: (3, H, W) in [0, 1].
        positions: (N, 2), (y, x), fraction of height and width: the windows' centres; or (N, 3) with their scales.
        window: K, a window's side in pixels.
        rows: "class" and "probability" (in percent), best first.
        saliency: (H, W), the map that the tokens were placed by, in a panel of its own.
    """
    height, width = image.shape[-2:]
    pictures = 2 if saliency is None else 3
    figure = PlainFigure(3.4 * pictures + 4.2, 3 * height / width + 0.7, dpi=130)
    *panels, bars = figure.subplots(1, pictures + 1, width_ratios=[*[1] * pictures, 1.2])
    if saliency is not None:
        draw_image(panels[0], image)
        panels[0].imshow(saliency.detach().cpu(), extent=(0, width, height, 0), cmap="magma", alpha=0.7)
        panels[0].set_title("the map that places them", fontsize=10)
    shown = seen(image, positions, window)
    draw_image(panels[-2], image)
    draw_windows(panels[-2], image, positions, window, TOWARDS(1.0))
    sides = window_sides(positions, window)
    side = f"{sides.min():.0f}" if sides.max() - sides.min() < 0.5 else f"{sides.min():.0f} to {sides.max():.0f}"
    panels[-2].set_title(f"{len(positions)} windows of {side} × {side}", fontsize=10)
    draw_image(panels[-1], image, shown)
    panels[-1].set_title(f"the model saw {shown.mean().item():.0%} of the pixels", fontsize=10)

    percent = [float(row["probability"]) for row in rows]
    bars.barh(range(len(rows)), percent, color=TOWARDS(0.35), height=0.35)
    for index, (row, value) in enumerate(zip(rows, percent, strict=True)):
        name = shorten(str(row["class"]), 34, placeholder="…")
        bars.text(0, index - 0.22, f"{name}, {value:.1f} %", va="bottom", fontsize=9)
    bars.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.8), xlabel="probability, %", yticks=[])
    bars.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    return figure
