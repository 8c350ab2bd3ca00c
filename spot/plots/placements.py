"""Figures of placements: an image, its windows, the prediction, and the oracle's paths (paper, figures 4, 9 and 10).

Images are RGB (3, H, W) in [0, 1]. A trajectory is (steps + 1, N, 2), (y, x) as a fraction of height
and width, or (steps + 1, N, 3) with the scale of each window. Paths run from dark purple at the start to
bright yellow at the end, or to red for an adversarial search. `draw_paths` and `draw_windows` draw on any
matplotlib axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from spot.errors import InputError
from spot.plots.layout import PlainFigure, Row
from spot.tokens.windows import windows

PATH_COLORS: Colormap = matplotlib.colormaps["viridis"]
ADVERSARIAL_COLORS: Colormap = LinearSegmentedColormap.from_list("ascent", [PATH_COLORS(0.0), (0.863, 0.196, 0.125)])
MAGNIFICATIONS = (1, 2, 3, 5, 10, 20)
DIM = 0.3  # brightness of pixels outside all windows


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
    """Draw one image in three panels: the windows at the start, the search, and the windows at the end.

    Args:
        window: K, a window's side in pixels.
        start, end: captions, such as the prediction and its probability.
    """
    colors = ADVERSARIAL_COLORS if adversarial else PATH_COLORS
    height, width = image.shape[-2:]
    figure = PlainFigure(10.5, 3.5 * height / width + 0.7, dpi=130)
    first, middle, last = figure.subplots(1, 3)
    for axes, step, color, caption in ((first, 0, colors(0.0), start), (last, -1, colors(1.0), end)):
        draw_image(axes, image, covered(image, trajectory[step], window))
        draw_windows(axes, image, trajectory[step], window, color)
        axes.set_title(caption, fontsize=10)
    draw_image(middle, image)
    times = magnification([trajectory])
    draw_sizes(middle, image, trajectory, window, colors, times)
    draw_paths(middle, image, trajectory, colors, times)
    steps = len(trajectory) - 1
    caption = f"{trajectory.shape[1]} tokens, {steps} step{'s' if steps != 1 else ''}"
    middle.set_title(caption + magnified(times), fontsize=10)
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def windows_figure(
    image: Tensor,
    positions: Tensor,
    window: int,
    rows: Sequence[Row],
    *,
    saliency: Tensor | None = None,
    title: str = "",
) -> Figure:
    """Draw an image with its windows, the image darkened outside the windows, and the predicted classes.

    Args:
        image: (3, H, W) in [0, 1].
        positions: the windows' centres (N, 2), (y, x), as a fraction of height and width; (N, 3) with scales; or
            (N, 7) with regions, whose samples are shown beside the picture.
        window: K, a window's side in pixels.
        rows: "class" and "probability" (in percent), best first.
        saliency: (H, W), the saliency map of the prior, drawn in a separate panel.
    """
    height, width = image.shape[-2:]
    pictures = 2 if saliency is None else 3
    tall = max(3 * height / width, 0.45 * len(rows) + 0.5)  # at least the height of the class labels
    figure = PlainFigure(3.4 * pictures + 4.2, tall + 0.7, dpi=130)
    *panels, bars = figure.subplots(1, pictures + 1, width_ratios=[*[1] * pictures, 1.2])
    if saliency is not None:
        draw_image(panels[0], image)
        panels[0].imshow(saliency.detach().cpu(), extent=(0, width, height, 0), cmap="magma", alpha=0.7)
        panels[0].set_title("saliency map", fontsize=10)
    draw_image(panels[-2], image)
    draw_windows(panels[-2], image, positions, window, PATH_COLORS(1.0))
    if positions.shape[-1] == 7:
        draw_glimpses(panels[-1], image, positions)
    else:
        shown = covered(image, positions, window)
        draw_image(panels[-1], image, shown)
        panels[-1].set_title(f"the windows cover {shown.mean().item():.0%} of the pixels", fontsize=10)
    sides = window_sides(positions, window)
    side = f"{sides.min():.0f}" if sides.max() - sides.min() < 0.5 else f"{sides.min():.0f} to {sides.max():.0f}"
    panels[-2].set_title(f"{len(positions)} windows of {side} × {side}", fontsize=10)

    percent = [float(row["probability"]) for row in rows]
    bars.barh(range(len(rows)), percent, color=PATH_COLORS(0.35), height=0.35)
    for index, (row, value) in enumerate(zip(rows, percent, strict=True)):
        name = shorten(str(row["class"]), 34, placeholder="…")
        bars.text(0, index - 0.22, f"{name}, {value:.1f} %", va="bottom", fontsize=9)
    bars.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.8), xlabel="probability, %", yticks=[])
    bars.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    return figure


@dataclass
class Gallery:
    """One part of a figure of galleries, with a panel per image that shows the paths of its tokens.

    Args:
        images, trajectories: M of each; a trajectory without steps, (1, N, 2), is a placement.
        window: K, to outline the windows at the end too.
        masks: saliency (M, H, W) in [0, 1]; pixels that are not salient are darkened.
    """

    images: Tensor | Sequence[Tensor]
    trajectories: Tensor | Sequence[Tensor]
    captions: Sequence[str] | None = None
    window: int | None = None
    masks: Tensor | Sequence[Tensor] | None = None
    adversarial: bool = False
    columns: int = 5
    title: str = ""

    def __post_init__(self) -> None:
        if len({len(self.images), len(self.trajectories), len(self.captions or self.images)}) > 1:
            raise InputError("a gallery needs one trajectory, and one caption if any, for each image")
        self.columns = min(self.columns, len(self.images))


def gallery_figure(parts: Sequence[Gallery], width: float | None = None) -> Figure:
    """Stack galleries vertically. Each gallery magnifies short moves by one factor, stated in its title."""
    width = width or 2.2 * max(part.columns for part in parts)
    heights = []
    for part in parts:
        high, wide = part.images[0].shape[-2:]
        rows = -(-len(part.images) // part.columns)
        heights.append(rows * (width / part.columns * high / wide + 0.25) + (0.4 if part.title else 0))
    figure = PlainFigure(width, sum(heights), dpi=120)
    insides = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, inside in zip(parts, insides, strict=True):
        colors, times = ADVERSARIAL_COLORS if part.adversarial else PATH_COLORS, magnification(part.trajectories)
        grid = inside.subplots(-(-len(part.images) // part.columns), part.columns, squeeze=False).flatten()
        for spare in grid[len(part.images) :]:
            spare.remove()
        for index, (axes, image) in enumerate(zip(grid, part.images, strict=False)):
            trajectory = part.trajectories[index]
            draw_image(axes, image, None if part.masks is None else part.masks[index])
            if part.window is not None:
                draw_windows(axes, image, trajectory[-1], part.window, colors(1.0), linewidth=0.6)
            draw_paths(axes, image, trajectory, colors, times)
            axes.set_title("" if part.captions is None else part.captions[index], fontsize=7)
        inside.suptitle(part.title + magnified(times), fontsize=10)
    return figure


def magnification(trajectories: Tensor | Sequence[Tensor]) -> int:
    """The largest factor for drawing moves at which the median move spans at most a tenth of the image."""
    # The largest distance of each token from its start.
    far = [(path - path[:1])[..., :2].norm(dim=-1).amax(0).flatten() for path in trajectories]
    usual = float(torch.cat(far).median()) if far else 0.0
    return max(times for times in MAGNIFICATIONS if times == 1 or 0 < times * usual <= 1 / 10)


def magnified(times: int) -> str:
    """The caption's note on magnified moves."""
    return f", moves drawn {times} × as long" if times > 1 else ""


def draw_image(axes: Axes, image: Tensor, visible: Tensor | None = None) -> None:
    """Draw an image on axes in pixels, pixel i from i to i + 1. It is darker where visible (H, W) is low."""
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
    """Outline the windows at positions (N, 2 or 3), or the regions of positions (N, 7)."""
    centers, sizes = pixels(image, positions), window_sides(positions, window).expand(-1, 2)
    if positions.shape[-1] == 7:  # their windows would hide a small region
        regions = torch.unique(positions[:, 3:].detach().cpu(), dim=0)
        centers, sizes = pixels(image, regions), pixels(image, regions[:, 2:])
    outlines = [
        Rectangle((x, y), wide, tall)
        for (y, x), (tall, wide) in zip((centers - sizes / 2).tolist(), sizes.tolist(), strict=True)
    ]
    for edge, extra in (("white", 0.8), (color, 0.0)):  # with a pale edge, like paths
        axes.add_collection(PatchCollection(outlines, facecolor="none", edgecolor=edge, linewidth=linewidth + extra))


def draw_paths(axes: Axes, image: Tensor, trajectory: Tensor, colors: Colormap = PATH_COLORS, times: float = 1) -> None:
    """Draw each token's path, with a dot at its start and a larger one at its end.

    Moves are magnified `times` from their start. A trajectory without steps is drawn as white dots, like the
    priors in the paper.
    """
    trajectory = trajectory[:1] + times * (trajectory - trajectory[:1])
    points = pixels(image, trajectory).flip(-1).transpose(0, 1)  # (N, steps + 1, 2) as matplotlib's (x, y)
    if points.shape[1] == 1:
        x, y = points[:, 0].T.numpy()
        axes.scatter(x, y, s=14, color="white", edgecolors="black", linewidths=0.7, zorder=3)
        return
    segments = torch.stack([points[:, :-1], points[:, 1:]], 2)  # (N, steps, 2, 2)
    steps = segments.shape[1]
    shades = [colors(step / max(steps - 1, 1)) for step in range(steps)]
    lines = list(segments.flatten(0, 1).numpy())
    # A pale edge makes the dark start visible on dark images.
    axes.add_collection(LineCollection(lines, colors="white", linewidths=3.2, alpha=0.55, capstyle="round"))
    axes.add_collection(LineCollection(lines, colors=shades * len(segments), linewidths=2.0, capstyle="round"))
    for step, size in ((0, 4), (-1, 8)):
        x, y = points[:, step].T.numpy()
        axes.scatter(x, y, s=size, color=colors(float(step != 0)), edgecolors="black", linewidths=0.3, zorder=3)


def draw_glimpses(axes: Axes, image: Tensor, positions: Tensor) -> None:
    """Draw the regions of the tokens at positions (N, 7) side by side, as the model samples them."""
    height, width = image.shape[-2:]
    groups = torch.unique(positions[:, 2:].detach().cpu(), dim=0)  # one row (scale, y, x, height, width) per region
    groups = groups[groups[:, 3] < 1] if bool((groups[:, 3] < 1).any()) else groups  # no whole picture
    views = []
    for scale, y, x, tall, wide in groups.tolist():
        side = max(1, round(max(tall * height, wide * width) / scale))
        place = torch.tensor([[[y, x, scale]]])
        views.append(windows(image.detach().cpu().float()[None], place, side)[0, 0])
    largest = max(view.shape[-1] for view in views)
    row = torch.ones(3, largest, sum(view.shape[-1] for view in views) + 4 * (len(views) - 1))
    left = 0
    for view in views:
        row[:, : view.shape[-2], left : left + view.shape[-1]] = view
        left += view.shape[-1] + 4
    draw_image(axes, row)
    axes.set_title(f"sampled with up to {largest} × {largest} pixels", fontsize=10)


def draw_sizes(
    axes: Axes, image: Tensor, trajectory: Tensor, window: int, colors: Colormap = PATH_COLORS, times: float = 1
) -> None:
    """Outline windows with scales at the start, half way and at the end, in the colours of the path.

    Sizes are not magnified. The centres lie on the paths of `draw_paths`, magnified `times`.
    """
    if trajectory.shape[-1] < 3:
        return
    last = len(trajectory) - 1
    for step in sorted({0, last // 2, last}):
        positions = trajectory[step].clone()
        positions[:, :2] = trajectory[0, :, :2] + times * (positions[:, :2] - trajectory[0, :, :2])
        draw_windows(axes, image, positions, window, colors(step / max(last, 1)), linewidth=0.7)


def covered(image: Tensor, positions: Tensor, window: int) -> Tensor:
    """A mask (H, W): 1 for pixels whose centre lies in a window, else 0."""
    height, width = image.shape[-2:]
    places = pixels(image, positions)
    half = window_sides(positions, window) / 2
    rows = ((torch.arange(height) + 0.5) - places[:, 0, None]).abs() <= half  # (N, H)
    columns = ((torch.arange(width) + 0.5) - places[:, 1, None]).abs() <= half  # (N, W)
    return (rows[:, :, None] & columns[:, None]).any(0).float()


def pixels(image: Tensor, positions: Tensor) -> Tensor:
    """Convert positions (..., 2 or 3) to pixels (..., 2), (y, x) from the image's upper left corner."""
    return positions[..., :2].detach().cpu().float() * torch.tensor(image.shape[-2:], dtype=torch.float32)


def window_sides(positions: Tensor, window: int) -> Tensor:
    """The side of each window in pixels, (N, 1): K, or K times its scale."""
    scale = positions[..., 2:3].detach().cpu().float()
    return window * (scale if scale.shape[-1] else torch.ones(*positions.shape[:-1], 1))
