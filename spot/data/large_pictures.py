"""Large pictures with one label each and optional boxes, for training a finder.

    pictures = LargePictures.open("signs", split="train")        # signs/train/<class>/*
    boxes = read_boxes("signs/boxes.csv", pictures)         # by key: (n, 4), left, top, right, bottom in pixels

A key is a path relative to the data's root, including the split: train/danger/00493.webp.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.functional import to_tensor

from spot.data.images import open_data
from spot.data.picture import open_image
from spot.errors import InputError

COLUMNS = ("file", "left", "top", "right", "bottom")


@dataclass(frozen=True)
class LargePictures:
    """Pictures, kept in memory as bytes after the first read: 3 MB per megapixel."""

    root: Path
    keys: Sequence[str]
    labels: Sequence[int]
    classes: Sequence[str]
    read: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, root: str | Path, split: str = "train") -> "LargePictures":
        """Open a folder with one sub-folder per class, or with train and val folders of this layout."""
        data = open_data(root, split=split, transform=to_tensor)
        labels = [label for _, label in data.source]
        if len(data.classes) < 2:
            raise InputError(f"one sub-folder per class is needed, at least two, and {root} has {len(data.classes)}")
        if empty := [name for label, name in enumerate(data.classes) if label not in set(labels)]:
            raise InputError(f"the class folder {empty[0]} has no image; add some or remove it")
        return cls(Path(root), data.keys, labels, data.classes)

    def __len__(self) -> int:
        return len(self.keys)

    def pixels(self, index: int) -> Tensor:
        """RGB bytes (3, H, W)."""
        key = self.keys[index]
        if key not in self.read:
            image = np.array(open_image(self.root / key))
            self.read[key] = torch.from_numpy(image).permute(2, 0, 1).contiguous()
        return self.read[key]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The key and the pixels of each picture."""
        return ((key, self.pixels(index)) for index, key in enumerate(self.keys))

    def part(self, keys: Iterable[str]) -> "LargePictures":
        """The pictures with these keys. They share the pixels in memory."""
        wanted = set(keys)
        kept = [index for index, key in enumerate(self.keys) if key in wanted]
        chosen = [self.keys[index] for index in kept], [self.labels[index] for index in kept]
        return LargePictures(self.root, *chosen, self.classes, self.read)

    def with_places(self, places: Mapping[str, Tensor], none: int | None) -> "LargePictures":
        """The pictures with places, and those of the class `none`, which contain no object."""
        labelled = zip(self.keys, self.labels, strict=True)
        return self.part([key for key, label in labelled if label == none or len(places.get(key, ()))])


def read_boxes(path: str | Path, pictures: LargePictures) -> dict[str, Tensor]:
    """Read the boxes (n, 4) of each picture, (left, top, right, bottom) in pixels, from a CSV file."""
    boxes: dict[str, list[list[float]]] = {key: [] for key in pictures.keys}
    if not Path(path).is_file():
        raise InputError(f"a CSV file with boxes was expected, but {path} is missing")
    with Path(path).open(newline="") as file:
        rows = csv.DictReader(file)
        if missing := set(COLUMNS) - set(rows.fieldnames or ()):
            raise InputError(f"{path} must have the columns {', '.join(COLUMNS)}; {', '.join(sorted(missing))} missing")
        for number, row in enumerate(rows, 2):
            try:
                box = [float(row[name]) for name in COLUMNS[1:]]
            except ValueError:
                raise InputError(f"line {number} of {path} has something other than numbers in its box") from None
            if row["file"] not in boxes:
                continue  # a picture of the other split
            height, width = pictures.pixels(pictures.keys.index(row["file"])).shape[1:]
            left, top, right, bottom = box
            if not (0 <= left < right <= width and 0 <= top < bottom <= height):
                raise InputError(
                    f"line {number} of {path} has a box that is empty or outside its picture of {height} × {width} "
                    f"pixels: left {left:g}, top {top:g}, right {right:g}, bottom {bottom:g}"
                )
            boxes[row["file"]].append(box)
    if not any(boxes.values()):
        raise InputError(
            f"{path} has no box for any of the {len(pictures)} pictures; files are paths below the data's root"
        )
    return {key: torch.tensor(rows, dtype=torch.float32).reshape(-1, 4) for key, rows in boxes.items()}


def boxes_to_places(boxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert boxes (n, 4) to places (n, 4): (y, x, longer side) in pixels, and a weight of 1."""
    places = {}
    for key, box in boxes.items():
        middle = (box[:, :2] + box[:, 2:]).flip(1) / 2
        size = (box[:, 2:] - box[:, :2]).amax(1, keepdim=True) if len(box) else box[:, :1]
        places[key] = torch.cat([middle, size, torch.ones_like(size)], 1)
    return places
