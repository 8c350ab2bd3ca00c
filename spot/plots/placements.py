"""Pictures of placements: an image, its windows, and where the oracle moved them (paper, figures 4, 9 and 10).

Images are RGB (3, H, W) in [0, 1]; a trajectory is (steps + 1, N, 2), (y, x) as a fraction of height
and width. Paths run from dark purple at the start to bright yellow at the end, or to red where the
search was adversarial. `draw_paths` and `draw_windows` draw on any matplotlib axes.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from torch import Tensor

from spot.errors import InputError
from spot.store import whole

TOWARDS: Colormap = matplotlib.colormaps["viridis"]
AWAY: Colormap = LinearSegmentedColormap.from_list("ascent", [TOWARDS(0.0), (0.863, 0.196, 0.125)])
DIM = 0.3  # brightness of what no window shows


def placement_figure(
    image: Tensor,
    trajectory: Tensor,
    window: int,
    *,
    start: str = "start",
    end: str = "end",
    title: str = "",
    adversarial: bool = False,
) -> Figure:
    """One image in three panels: what the model saw at the start, the search, what it saw at the end.

    Args:
        window: K, a window's side in pixels.
        start, end: captions, such as the prediction and its probability.
    """
    colors = AWAY if adversarial else TOWARDS
    height, width = image.shape[-2:]
    figure = Figure(figsize=(10.5, 3.5 * height / width + 0.7), dpi=130, layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, step, color, caption in (
        (panels[0], 0, colors(0.0), start),
        (panels[2], -1, colors(1.0), end),
    ):
        draw_image(axes, image, seen(image, trajectory[step], window))
        draw_windows(axes, image, trajectory[step], window, color)
        axes.set_title(caption, fontsize=10)
    draw_image(panels[1], image)
    draw_paths(panels[1], image, trajectory, colors)
    steps = len(trajectory) - 1
    panels[1].set_title(f"{trajectory.shape[1]} tokens, {steps} step{'s' if steps != 1 else ''}", fontsize=10)
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def placement_gallery(
    images: Tensor | Sequence[Tensor],
    trajectories: Tensor | Sequence[Tensor],
    *,
    captions: Sequence[str] | None = None,
    window: int | None = None,
    masks: Tensor | None = None,
    adversarial: bool = False,
    columns: int = 5,
    title: str = "",
) -> Figure:
    """Many images, one panel each, with the paths of their tokens.

    Args:
        images, trajectories: M of each; a trajectory of no steps, (1, N, 2), is a placement.
        window: with K, the windows at the end are outlined too.
        masks: saliency (M, H, W) in [0, 1]; what is not salient is darkened.
    """
    columns = min(columns, len(images))
    rows = ceil(len(images) / columns)
    figure = Figure(figsize=(2.2 * columns, 2.4 * rows + (0.4 if title else 0)), dpi=150, layout="constrained")
    draw_gallery(
        figure, images, trajectories, captions=captions, window=window, masks=masks, adversarial=adversarial,
        columns=columns, title=title,
    )  # fmt: skip
    return figure


def draw_gallery(
    figure: Figure | SubFigure,
    images: Tensor | Sequence[Tensor],
    trajectories: Tensor | Sequence[Tensor],
    *,
    captions: Sequence[str] | None,
    window: int | None,
    masks: Tensor | Sequence[Tensor] | None,
    adversarial: bool,
    columns: int,
    title: str,
) -> None:
    """A gallery in a figure, or in a part of a larger one; see `placement_gallery`."""
    if len(images) != len(trajectories) or (captions is not None and len(captions) != len(images)):
        raise InputError("a gallery needs one trajectory, and one caption if any, for each image")
    colors = AWAY if adversarial else TOWARDS
    grid = figure.subplots(ceil(len(images) / columns), columns, squeeze=False).flatten()
    for axes in grid:
        axes.axis("off")
    for index, (image, trajectory) in enumerate(zip(images, trajectories, strict=True)):
        draw_image(grid[index], image, None if masks is None else masks[index])
        if window is not None:
            draw_windows(grid[index], image, trajectory[-1], window, colors(1.0), linewidth=0.6)
        draw_paths(grid[index], image, trajectory, colors)
        grid[index].set_title("" if captions is None else captions[index], fontsize=7)
    figure.suptitle(title, fontsize=10)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure, whole or not at all; the suffix says the format."""
    kinds = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise InputError(f"a picture can be {', '.join(kinds)}, got {path}")
    with whole(path) as temporary:
        figure.savefig(temporary)


def draw_image(axes: Axes, image: Tensor, visible: Tensor | None = None) -> None:
    """The image on axes in pixels, pixel i from i to i + 1; darker where visible (H, W) is low."""
    height, width = image.shape[-2:]
    image = image.detach().cpu().clamp(0, 1)
    if visible is not None:
        image = image * (DIM + (1 - DIM) * visible.detach().cpu())
    axes.imshow(image.permute(1, 2, 0).numpy(), extent=(0, width, height, 0), interpolation="nearest")
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")


def draw_windows(
    axes: Axes, image: Tensor, positions: Tensor, window: int, color: tuple, linewidth: float = 1.0
) -> None:
    """Outlines of the windows at positions (N, 2)."""
    corners = pixels(image, positions) - window / 2
    outlines = [Rectangle((x, y), window, window) for y, x in corners.tolist()]
    for edge, extra in (("white", 0.8), (color, 0.0)):  # on a pale edge, as paths are
        axes.add_collection(PatchCollection(outlines, facecolor="none", edgecolor=edge, linewidth=linewidth + extra))


def draw_paths(axes: Axes, image: Tensor, trajectory: Tensor, colors: Colormap = TOWARDS) -> None:
    """The path of every token through its steps, with a dot at its start and a larger one at its end.

    Tokens that take no step are white dots, as the paper draws its priors.
    """
    points = pixels(image, trajectory).flip(-1).transpose(0, 1)  # (N, steps + 1, 2) as matplotlib's (x, y)
    if points.shape[1] == 1:
        x, y = points[:, 0].T.numpy()
        axes.scatter(x, y, s=14, color="white", edgecolors="black", linewidths=0.7, zorder=3)
        return
    segments = torch.stack([points[:, :-1], points[:, 1:]], 2)  # (N, steps, 2, 2)
    steps = segments.shape[1]
    shades = [colors(step / max(steps - 1, 1)) for step in range(steps)]
    lines = list(segments.flatten(0, 1).numpy())
    # On a pale edge, because the start is as dark as many images.
    axes.add_collection(LineCollection(lines, colors="white", linewidths=3.2, alpha=0.55, capstyle="round"))
    axes.add_collection(LineCollection(lines, colors=shades * len(segments), linewidths=2.0, capstyle="round"))
    for step, size in ((0, 4), (-1, 8)):
        x, y = points[:, step].T.numpy()
        axes.scatter(x, y, s=size, color=colors(float(step != 0)), edgecolors="black", linewidths=0.3, zorder=3)


def seen(image: Tensor, positions: Tensor, window: int) -> Tensor:
    """1 for the pixels (H, W) of an image whose centre lies in a window, else 0."""
    height, width = image.shape[-2:]
    places = pixels(image, positions)
    rows = ((torch.arange(height) + 0.5) - places[:, 0, None]).abs() <= window / 2  # (N, H)
    columns = ((torch.arange(width) + 0.5) - places[:, 1, None]).abs() <= window / 2  # (N, W)
    return (rows[:, :, None] & columns[:, None]).any(0).float()


def pixels(image: Tensor, positions: Tensor) -> Tensor:
    """Positions (..., 2) in pixels of the image, from its upper left corner."""
    return positions.detach().cpu().float() * torch.tensor(image.shape[-2:], dtype=torch.float32)
