"""Draw the README's street: python -m tools.street MODEL PHOTO [OUT].

MODEL is a folder that `spot learn --look glimpses` wrote, PHOTO a photograph of the data of signs, below its val.
Writes docs/images/street.jpg: the places that the model classified, what its tokens saw, and the predictions. Those of
other inputs are the ones that `python -m paper.signs` wrote to docs/results/signs/signs.json.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import spot
from spot import report
from spot.data.picture import open_image, photo_transform
from spot.models.glimpsed import Glimpsed
from spot.placement.saliency import rgb
from spot.plots import save
from spot.plots.layout import PlainFigure
from spot.plots.placements import draw_image
from spot.store import read_json

DOCS = Path(__file__).parents[1] / "docs"
BESIDE = {  # other inputs of the same street, by their names in the study
    "frozen: picture shrunk to 224 pixels across": "112 patches of the street at 224 pixels",
    "frozen: picture shrunk to 680 pixels across": "1,050 patches, at 680 pixels",
    "frozen: all patches": "all 4,250 patches",
}
COLOURS = ("#ffd21f", "#ff8c1a", "#ff5ca8")


def main(model: Path, photo: Path, out: Path = DOCS / "images" / "street.jpg") -> None:
    """Draw the figure."""
    save(street(spot.load(model).eval(), photo, read_json(DOCS / "results" / "signs" / "signs.json")), out)
    report.say(f"The figure is {out}.")


@torch.no_grad()
def street(model: spot.SpotViT, photo: Path, study: dict[str, Any]) -> Figure:
    """The street with the places that were classified, each as its tokens see it, and the predictions."""
    images = photo_transform(model.data_config, "full")(open_image(photo))[None]
    picture = rgb(images, model.data_config)[0]
    height, width = picture.shape[-2:]
    several = Glimpsed(model)
    glimpses = several.finder.find(images, several.glimpses).glimpses
    logits = several.each(images, glimpses)
    names = model.class_names or [f"class {index}" for index in range(model.num_classes)]
    figure = PlainFigure(13, 5.6, dpi=110)
    wide, narrow = figure.subfigures(1, 2, width_ratios=[2.5, 1])
    axes = wide.subplots()
    draw_image(axes, picture)
    axes.set_title(f"{width} × {height} pixels: {several.tokens} tokens on {several.glimpses} places", fontsize=12)
    *cells, answers = narrow.subplots(several.glimpses + 1, 1, height_ratios=[*[1] * several.glimpses, 0.9])
    for number, (inset, colour) in enumerate(zip(cells, COLOURS, strict=False)):
        y, x, side = glimpses[0, number].tolist()
        corner = (x * width - side / 2, y * height - side / 2)
        axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=2.5))
        draw_image(inset, seen(several, images, glimpses[:, number : number + 1]))
        inset.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=colour, linewidth=6, transform=inset.transAxes))
        best = logits[0, number].softmax(0).max(0)
        inset.set_title(f"{names[int(best.indices)]} {best.values * 100:.0f} %", fontsize=11)
    kind = f"{photo.parent.parent.name}/{photo.parent.name}/{photo.name}"
    row = study["keys"].index(kind)
    lines = [f"{text}: {study['predicted'][name][row]}" for name, text in BESIDE.items() if name in study["predicted"]]
    here = names[int(several.decide(logits)[0].argmax())]
    answers.text(
        0.5, 0.95, f"{several.tokens} placed tokens: {here}", ha="center", va="top", fontsize=12, weight="bold"
    )
    answers.text(0.5, 0.7, "\n".join(lines), ha="center", va="top", fontsize=10.5, linespacing=1.5)
    answers.axis("off")
    return figure


def seen(several: Glimpsed, images: Tensor, glimpse: Tensor) -> Tensor:
    """A glimpse (1, 1, 3) as its tokens see it: (3, S, S) in [0, 1]."""
    window, rows = several.model.patch_size, round(several.each_tokens**0.5)
    read = spot.windows(images, several.positions(images, glimpse), window)[0].unflatten(0, (rows, rows))
    view = read.permute(2, 0, 3, 1, 4).reshape(1, 3, rows * window, rows * window)
    return rgb(view, several.model.data_config)[0]


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
