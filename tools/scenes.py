"""Draw examples of every class of the built-in data: python -m tools.scenes [scenes | needle | needle:256] [FILE]."""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import pad

from spot import report
from spot.data.difficulty import difficulty_of
from spot.data.scenes import CLASSES, Scenes
from spot.data.shapes import OUTLINES, TEXTURES
from spot.errors import unknown
from spot.plots import save

ZOOM = 2  # screen pixels per image pixel, enlarged without smoothing
GAP = 4  # image pixels between cells


def main(name: str = "scenes", out: Path = Path("scenes.png"), *, examples: int = 3) -> None:
    """Save a contact sheet: every outline (rows) with every texture (columns), some examples of each."""
    difficulty = difficulty_of(name)
    if difficulty is None:
        raise unknown("built-in data set", name, ("scenes", "needle"))
    images = Scenes("train", len(CLASSES) * examples, difficulty=difficulty).draw(range(len(CLASSES) * examples)).images
    sheet = images.unflatten(0, (examples, len(OUTLINES), len(TEXTURES))).permute(1, 2, 0, 3, 4, 5)
    save(contact_sheet(sheet, list(OUTLINES), list(TEXTURES)), out)
    report.say(f"The contact sheet is in {out}.")


def contact_sheet(images: Tensor, rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """Images (R, C, E, 3, H, W) in [0, 1] as one picture: E examples in each of R × C named cells."""
    count_rows, count_columns, examples, _, height, width = images.shape
    cells = images.permute(0, 4, 1, 2, 5, 3).reshape(count_rows, height, count_columns, examples * width, 3)
    cells = pad(cells, (0, 0, 0, GAP, 0, 0, 0, GAP), value=1.0)
    sheet = cells.reshape(count_rows * (height + GAP), -1, 3)[:-GAP, :-GAP]

    dpi, left, top = 100, 0.8, 0.3  # dots per inch; inches for the names
    size = (left + sheet.shape[1] * ZOOM / dpi, top + sheet.shape[0] * ZOOM / dpi)
    figure = Figure(figsize=size, dpi=dpi)  # laid out to the pixel
    axes = figure.add_axes((left / size[0], 0, 1 - left / size[0], 1 - top / size[1]))
    axes.imshow(sheet.numpy(), interpolation="nearest", aspect="auto")
    axes.set_xticks([(i + 0.5) * (examples * width + GAP) - GAP / 2 for i in range(count_columns)], columns)
    axes.set_yticks([(i + 0.5) * (height + GAP) - GAP / 2 for i in range(count_rows)], rows)
    axes.tick_params(length=0, labelsize=11, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    return figure


if __name__ == "__main__":
    name, out = [*sys.argv[1:], *("scenes", "scenes.png")[len(sys.argv) - 1 :]]
    main(name, Path(out))
