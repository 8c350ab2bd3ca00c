"""Draw examples of every class of the built-in data: python -m tools.scenes [scenes | needle | needle:256] [FILE]."""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from spot import report
from spot.data.difficulty import difficulty_of
from spot.data.scenes import CLASSES, Scenes
from spot.data.shapes import OUTLINES, TEXTURES
from spot.errors import unknown
from spot.plots import save

EXAMPLES = 3  # of every class
INCH = 50  # image pixels


def contact_sheet(name: str) -> Figure:
    """Every outline (rows) with every texture (columns), and some examples of each."""
    difficulty = difficulty_of(name)
    if difficulty is None:
        raise unknown("built-in data set", name, ("scenes", "needle"))
    drawn = Scenes("train", len(CLASSES) * EXAMPLES, difficulty=difficulty).draw(range(len(CLASSES) * EXAMPLES))
    images = drawn.images.unflatten(0, (EXAMPLES, len(OUTLINES), len(TEXTURES)))  # (E, R, C, 3, H, W)
    side = images.shape[-1] / INCH
    figure = Figure((len(TEXTURES) * EXAMPLES * side, len(OUTLINES) * side), layout="constrained")
    for row, outline in enumerate(OUTLINES):
        for column, texture in enumerate(TEXTURES):
            axes = figure.add_subplot(len(OUTLINES), len(TEXTURES), row * len(TEXTURES) + column + 1)
            axes.imshow(torch.cat([*images[:, row, column]], 2).permute(1, 2, 0), interpolation="nearest")
            axes.set_xticks([], [])
            axes.set_yticks([], [])
            axes.set_title(texture if row == 0 else "")
            axes.set_ylabel(outline if column == 0 else "")
    return figure


def main(name: str = "scenes", out: str = "scenes.png") -> None:
    save(contact_sheet(name), Path(out))
    report.say(f"The contact sheet is in {out}.")


if __name__ == "__main__":
    main(*sys.argv[1:3])
