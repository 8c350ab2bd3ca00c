"""What a model predicted, image by image: the unit of intervals and paired tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spot.errors import InputError
from spot.placement.files import Placements
from spot.studies.statistics import share

NO_KNN = (
    "Rows without kNN need labelled images for a bank: --bank DIR (and, for salient and focus, their maps in "
    "--saliency)."
)


@dataclass(frozen=True)
class Predictions:
    """Whether one model was right about each of M images, in the order of the images' keys."""

    keys: list[str]
    right: Tensor  # (M,) bool
    knn: Tensor | None = None  # (M,) bool: were the neighbours right?

    def on(self, keys: Sequence[str]) -> "Predictions":
        """The same of some of the images, in this order."""
        row = {key: number for number, key in enumerate(self.keys)}
        missing = next((key for key in keys if key not in row), None)
        if missing is not None:
            raise InputError(f"image {missing!r} was not measured; a comparison needs the same images")
        rows = torch.tensor([row[key] for key in keys], dtype=torch.int64)
        return Predictions(list(keys), self.right[rows], None if self.knn is None else self.knn[rows])


def predicted(placements: Placements, step: int = -1) -> Predictions:
    """What the searching model itself predicted at a step of its search; 0 is the prior."""
    keys = sorted(placements.keys)
    rows = placements.rows(keys)
    values = placements.values
    return Predictions(keys, values["predictions"][rows, step] == values["labels"][rows])


def over_seeds(predictions: Sequence[Predictions]) -> dict[str, float | int | None]:
    """Accuracy and, where neighbours voted, kNN accuracy over seeds, with intervals over images."""
    row = {"seeds": len(predictions), **share(torch.stack([each.right for each in predictions]))}
    votes = [each.knn for each in predictions if each.knn is not None]
    if votes:
        knn = share(torch.stack(votes), "knn")
        row |= {"knn": knn["knn"], "knn_low": knn["low"], "knn_high": knn["high"], "knn_std": knn["std"]}
    return row
