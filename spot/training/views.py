"""Fixed views of training images, kept on disk with what the teacher makes of them.

A view is a crop of an image, or a mixture of two, that looks the same whenever it is visited. The teacher sees each
view once and the file system remembers the rest, so that a run of more epochs than views, or a second run on the same
images, spends its time on the student: a step of ViT-Ti takes two thirds as long.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import Normalize

from spot.data.images import Images
from spot.draws import Draw
from spot.hashes import hash_json
from spot.store import disk, read_json, write_json
from spot.training.batches import Plan, training_transform
from spot.training.recipes import Distil

SEED = 0  # views are a data set of their own: runs with other seeds share them


class Rows:
    """Tensors of one shape by number, in a file; rows that nobody has written yet are unknown, and take no space."""

    def __init__(self, file: Path, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        with disk(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            size = count * int(np.prod(shape))
            self.values = torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(count, *shape)
            marks = str(file.with_suffix(".known"))
            self.known = torch.from_file(marks, shared=True, size=count, dtype=torch.uint8)

    def write(self, numbers: Tensor, values: Tensor) -> None:
        """Keep values (n, …) as rows; they are marked as known only after they are there."""
        self.values[numbers] = values.to(self.values)
        self.known[numbers] = 1


class ViewPlan(Plan):
    """A stream of fixed views: epoch e shows view e mod V of each of its images."""

    def __init__(
        self, images: Images, recipe: Distil, data_config: dict[str, Any], weights: Tensor | None, folder: Path
    ) -> None:
        super().__init__(images, recipe, data_config, weights)
        self.recipe = recipe
        self.images.transform = training_transform(recipe, {**data_config, "mean": (0, 0, 0), "std": (1, 1, 1)})
        self.normalize = Normalize(data_config["mean"], data_config["std"])
        shape = (3, recipe.img_size, recipe.img_size)
        self.pixels = Rows(folder / "pixels.bin", len(self) * recipe.views, shape, torch.uint8)

    def __getitem__(self, place: int) -> tuple[Tensor, int, int]:  # type: ignore[override]
        """Of a place in the stream: the image, no label, and the number of its view."""
        epoch, index = divmod(place, len(self))
        view = self.order(epoch)[index] * self.recipe.views + epoch % self.recipe.views
        if not self.pixels.known[view]:
            pixels = self.mixed(*divmod(view, self.recipe.views))
            self.pixels.write(torch.tensor([view]), (pixels * 255).round()[None])
        return self.normalize(self.pixels.values[view] / 255), -1, view

    def mixed(self, number: int, view: int) -> Tensor:
        """A view (3, H, W) in [0, 1]: a crop, or a mixture of crops of two images."""
        recipe, crop = self.recipe, self.crop(number, view)
        draw = np.random.default_rng([SEED, Draw.MIX, number, view])
        if not recipe.mixup or draw.random() >= recipe.mix_share:
            return crop
        partner, share = int(draw.integers(len(self))), float(draw.beta(recipe.mixup, recipe.mixup))
        return torch.lerp(self.crop(partner, view), crop, share)

    def crop(self, number: int, view: int) -> Tensor:
        return self.augmented(number, SEED, number, view)[0]


class Targets:
    """What the teacher makes of views, computed when a view is first asked for. Kept in float16."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        there = folder / "shapes.json"
        shapes = read_json(there, "the shapes of a teacher's outputs") if there.is_file() else {}
        self.rows = {name: self.open(name, shape) for name, shape in shapes.items()}

    def open(self, name: str, shape: Sequence[int]) -> Rows:
        return Rows(self.folder / f"{name}.bin", self.count, tuple(shape), torch.float16)

    def unknown(self, views: Tensor) -> Tensor:
        """Which rows of a batch are of views (b,) that are not kept yet."""
        if not self.rows:
            return torch.arange(len(views))
        return torch.stack([each.known[views] == 0 for each in self.rows.values()]).any(0).nonzero()[:, 0]

    def write(self, views: Tensor, values: Mapping[str, Tensor]) -> None:
        """Keep the teacher's outputs by name, (b, …) each."""
        if not self.rows:
            shapes = {name: tuple(each.shape[1:]) for name, each in values.items()}
            self.rows = {name: self.open(name, shape) for name, shape in shapes.items()}
            write_json(self.folder / "shapes.json", shapes)
        for name, each in values.items():
            self.rows[name].write(views, each.cpu())

    def read(self, views: Tensor) -> dict[str, Tensor]:
        """The outputs of known views, as they were written."""
        return {name: rows.values[views].float() for name, rows in self.rows.items()}


def views_folder(cache: Path, teacher: str, images: Mapping[str, Any], recipe: Distil) -> Path:
    """Where the views of these images by this teacher (its hash) are, in a cache that others may share."""
    names = ("views", "img_size", "crop_scale", "flip", "mixup", "mix_share", "depths", "precision")
    settings = {name: getattr(recipe, name) for name in names}
    settings |= {} if recipe.randaug is None else {"randaug": recipe.randaug}
    return cache / hash_json({"teacher": teacher, "images": dict(images), **settings})
