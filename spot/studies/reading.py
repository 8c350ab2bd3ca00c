"""What a model made of images, one by one: the unit of intervals and paired tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spot.errors import InputError
from spot.placement.files import Placements


@dataclass(frozen=True)
class Reading:
    """What one model made of M images with one placement, in the order of the images' keys."""

    keys: list[str]
    right: Tensor  # (M,) bool
    knn: Tensor | None = None  # (M,) bool: were the neighbours right?

    def on(self, keys: Sequence[str]) -> "Reading":
        """The same of some of the images, in this order."""
        row = {key: number for number, key in enumerate(self.keys)}
        missing = next((key for key in keys if key not in row), None)
        if missing is not None:
            raise InputError(f"image {missing!r} was not read; a comparison needs the same images")
        rows = torch.tensor([row[key] for key in keys], dtype=torch.int64)
        return Reading(list(keys), self.right[rows], None if self.knn is None else self.knn[rows])


def outcome(placements: Placements, step: int = -1) -> Reading:
    """What the searching model itself made of its images at a step of the search; 0 is the prior."""
    keys = sorted(placements.keys)
    rows = placements.rows(keys)
    values = placements.values
    return Reading(keys, values["predictions"][rows, step] == values["labels"][rows])
