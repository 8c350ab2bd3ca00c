"""Draw the README's picture of the idea: `python -m tools.draw_idea` writes docs/images/idea.png.

On a built-in scene, the five grid patches that hold most of the object, and five windows of the same
size placed freely, both chosen greedily to cover the object. Below, what each of the ten tokens reads.
Of the first 128 test scenes it is the one in which freedom helps most: an illustration, not a measurement.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from spot.data.scenes import Scenes
from spot.placement.priors import isotropic
from spot.plots import save
from spot.plots.placements import draw_image, draw_windows, seen
from spot.tokens.windows import windows

TOKENS, WINDOW, SCENES = 5, 8, 128
COLORS = {"grid": (0.45, 0.2, 0.55), "free": (0.99, 0.78, 0.15)}


def cover(mask: Tensor, candidates: Tensor) -> Tensor:
    """Greedily the TOKENS of candidates (M, 2) whose windows add most of the mask (H, W)."""
    left, chosen = mask.clone(), []
    for _ in range(TOKENS):
        gains = windows(left[None, None], candidates[None], WINDOW)[0].sum((1, 2, 3))
        best = candidates[gains.argmax()]
        chosen.append(best)
        left = left * (1 - seen(left[None], best[None], WINDOW))
    return torch.stack(chosen)


def share(mask: Tensor, positions: Tensor) -> float:
    """How much of the mask (H, W) the windows at positions (N, 2) show."""
    return float((seen(mask[None], positions, WINDOW) * mask).sum() / mask.sum())


def compare(indices: Sequence[int], anywhere: Tensor) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor], float]]:
    """Each scene with both placements, and how much more the free one shows."""
    scenes = Scenes("test").draw(indices)
    grid = isotropic(scenes.images[:1], 64)[0]
    for image, mask in zip(scenes.images, scenes.masks, strict=True):
        placed = {"grid": cover(mask, grid), "free": cover(mask, anywhere)}
        yield image, mask, placed, share(mask, placed["free"]) - share(mask, placed["grid"])


def main(path: Path = Path(__file__).parents[1] / "docs" / "images" / "idea.png") -> None:
    anywhere = torch.cartesian_prod(torch.linspace(0.1, 0.9, 60), torch.linspace(0.1, 0.9, 60))
    image, mask, placed = max(compare(range(SCENES), anywhere), key=lambda found: found[3])[:3]

    figure = Figure(figsize=(8.2, 4.9), dpi=150, layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(4, 1))
    panels, strips = upper.subplots(1, 2), lower.subplots(1, 2 * TOKENS + 1)
    titles = {"grid": "A ViT picks patches of a fixed grid", "free": "SPoT places the same tokens anywhere"}
    for axes, (way, positions) in zip(panels, placed.items(), strict=True):
        draw_image(axes, image, seen(image, positions, WINDOW) * 0.65 + 0.35)
        if way == "grid":
            for line in range(0, 65, WINDOW):
                axes.axhline(line, color="white", linewidth=0.4, alpha=0.6)
                axes.axvline(line, color="white", linewidth=0.4, alpha=0.6)
        draw_windows(axes, image, positions, WINDOW, COLORS[way], linewidth=2)
        axes.set_title(f"{titles[way]}: {share(mask, positions):.0%} of the object", fontsize=9)
    for axes in strips:
        axes.axis("off")
    for number, (way, positions) in enumerate(placed.items()):
        tokens = windows(image[None], positions[None], WINDOW)[0]
        for axes, token in zip(strips[number * (TOKENS + 1) :], tokens, strict=False):
            axes.imshow(token.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
            axes.axis("on")
            axes.set(xticks=[], yticks=[])
            for edge in axes.spines.values():
                edge.set(color=COLORS[way], linewidth=2)
    save(figure, path)


if __name__ == "__main__":
    main()
