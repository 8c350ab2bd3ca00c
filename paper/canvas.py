"""Photographs in a canvas of four times their area, a stress test for locating objects.

Each image, transformed for the model, is placed at random in a canvas twice as high and wide. Square tiles cut from
four other images fill the rest, too small to contain whole objects. The image's place depends only on its key. The
tiles also depend on the list of all files.

    data = Canvas(data_for(model, "imagenet"))       # images (3, 448, 448) for a model of 224 pixels
    box_of(key)                                      # top, left, bottom and right, as fractions of the canvas
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from paper.sources import Sources
from spot.data.images import Images, Sample, Unread
from spot.data.picture import open_image
from spot.draws import generator_for
from spot.errors import InputError
from spot.hashes import hash_json
from spot.models.spot_vit import SpotViT

TILE = 32  # side of a tile, in pixels
OTHERS = 4  # images whose texture fills the canvas


class Canvas(Images):
    """The images of a folder or data set, each placed in a canvas."""

    def __init__(self, images: Images) -> None:
        vars(self).update(vars(images))

    def read(self, index: int) -> Sample | Unread:
        """The canvas (C, 2H, 2W) that contains the image, with its label and key."""
        sample = super().read(index)
        if isinstance(sample, Unread):
            return sample
        view, label, key = sample
        draw = generator_for(1, key)
        steps = 1 + torch.randint(max(1, len(self.source) - 1), (OTHERS,), generator=draw)  # never itself
        numbers = ((self.order[index] + steps) % len(self.source)).tolist()
        try:
            others = [self.transform(open_image(self.source[number][0])) for number in numbers]
        except InputError as error:
            return Unread(key, str(error))
        height, width = view.shape[-2:]
        canvas = tiled(others, 2 * height, 2 * width, draw)
        corner = box_of(key)[:2]
        top, left = (round(2 * length * at) for length, at in zip((height, width), corner, strict=True))
        canvas[:, top : top + height, left : left + width] = view
        return canvas, label, key


class CanvasSources(Sources):
    """The images of a study, each placed in a canvas."""

    def images(self, model: SpotViT, *, oracle: bool = False) -> Any:
        return Canvas(super().images(model, oracle=oracle))

    def images_hash(self, model: SpotViT, *, oracle: bool = False, bank: bool = False) -> str:
        return hash_json(["canvas", super().images_hash(model, oracle=oracle, bank=bank)])


def box_of(key: str) -> tuple[float, float, float, float]:
    """The image's box in its canvas, to the nearest pixel: (top, left, bottom, right), as fractions of the canvas."""
    top, left = (torch.rand(2, generator=generator_for(0, key)) / 2).tolist()
    return top, left, top + 0.5, left + 0.5


def tiled(images: Sequence[Tensor], height: int, width: int, draw: Generator) -> Tensor:
    """A picture (C, height, width) of square tiles, each a random crop of one of the images (C, H, W)."""
    side = min(TILE, *images[0].shape[-2:])
    rows, columns = -(-height // side), -(-width // side)
    places = torch.rand(rows * columns, 3, generator=draw).tolist()
    cut = []
    for which, *corner in places:
        image = images[int(which * len(images))]
        top, left = (int(at * (length - side + 1)) for at, length in zip(corner, image.shape[-2:], strict=True))
        cut.append(image[:, top : top + side, left : left + side])
    picture = torch.stack(cut).unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4)
    return picture.reshape(-1, rows * side, columns * side)[:, :height, :width].clone()
