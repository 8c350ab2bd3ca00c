"""Training batches: which image comes when, and how it is cropped, as a function of the seed.

Training reads an endless stream: epoch after epoch, each in an order of its own. Step s of batch
size G takes images s·G … s·G + G − 1 of it, divided first over accumulation, then over processes.

`ViewPlan` shows fixed views instead: a view is a crop of an image, or a mixture of two, that looks the same whenever
it is visited. The teacher sees each view once (`Targets`) and the disk keeps the rest, so that a run of more epochs
than views, or a second run on the same images, spends its time on the student.
"""

import copy
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Normalize

from spot.data.images import Images
from spot.data.scenes import Scenes
from spot.draws import Draw, generator, seeded
from spot.errors import InputError
from spot.hashes import hash_json
from spot.store import disk, read_json, write_json
from spot.training.recipes import DistilRecipe, Recipe

SCENES_PER_EPOCH = 8192


class Part(NamedTuple):
    """What one process reads for one backward pass."""

    step: int
    first: int  # row of the step's batch that images[0] is
    of: int  # rows in the step's batch
    images: Tensor  # (b, C, H, W)
    labels: Tensor  # (b,), -1 where there is none
    views: Tensor | None = None  # (b,), numbers of fixed views where the plan has them (`ViewPlan`)
    centers: Tensor | None = None  # (b, 2), (y, x) fractions: where the object of a scene is

    def own(self, drawn: Tensor) -> Tensor:
        """This part's rows (b, …) of what was drawn for the step's whole batch, so that parts of it agree."""
        return drawn[self.first : self.first + len(self.images)]


class Plan(Dataset[tuple[Tensor, int]]):
    """Numbered places of the stream: place p is image order(epoch)[p mod M], augmented for that epoch."""

    more = "views"  # what of a Part a third thing beside image and label is

    def __init__(self, images: Images, recipe: Recipe, data_config: dict[str, Any], weights: Tensor | None = None):
        """weights: how often to draw each image, instead of each once."""
        self.images, self.seed, self.weights = images, recipe.seed, weights
        self.images.transform = training_transform(recipe, data_config)
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.images)

    def order(self, epoch: int) -> list[int]:
        """Image numbers of an epoch: shuffled, or drawn in proportion to the weights."""
        if self._order[0] != epoch:
            draw = generator(self.seed, Draw.ORDER, epoch)
            if self.weights is None:
                numbers = torch.randperm(len(self), generator=draw)
            else:
                numbers = torch.multinomial(self.weights, len(self), replacement=True, generator=draw)
            self._order = (epoch, numbers.tolist())
        return self._order[1]

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        epoch, index = divmod(place, len(self))
        return self.augmented(self.order(epoch)[index], self.seed, place)

    def augmented(self, number: int, seed: int, *place: int) -> tuple[Tensor, int]:
        """The image of a number and its label; its augmentation is drawn for a place of the stream."""
        with seeded(seed, Draw.CROP, *place):
            sample = self.images[number]
        if sample is None:
            raise InputError(f"{self.images.keys[number]} cannot be read; take it out of the training images")
        return sample[0], sample[1]


class ScenePlan(Plan):
    """The built-in scenes as a stream: place p is scene p, so no scene is ever shown twice."""

    more = "centers"

    def __init__(self, scenes: Scenes, data_config: dict[str, Any]) -> None:
        self.epoch = len(scenes)
        self.scenes = copy.copy(scenes)
        self.scenes.length = 2**62
        self.scenes.transform = Normalize(data_config["mean"], data_config["std"])

    def __len__(self) -> int:
        return self.epoch

    def __getitems__(self, places: list[int]) -> list[tuple[Tensor, int, Tensor]]:
        """Images, labels and centers; scenes are drawn many times faster together."""
        batch = self.scenes.draw(places)
        return list(zip(batch.images, batch.labels.tolist(), batch.centers, strict=True))


def training_transform(recipe: Recipe, data_config: dict[str, Any]) -> Any:
    """timm's: random resized crop, flip, RandAugment, the model's own normalisation."""
    augment = recipe.randaug and "rand-m{}-mstd{}-inc1".format(*recipe.randaug)
    transform = create_transform(
        recipe.img_size,
        is_training=True,
        scale=recipe.crop_scale,
        hflip=recipe.flip,
        color_jitter=None,
        auto_augment=augment,
        interpolation="random" if recipe.randaug is None else data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
    )
    for step in transform.transforms:
        for operation in step.ops if isinstance(step, RandAugment) else ():
            if operation.name == "PosterizeIncreasing":
                operation.level_fn = posterize_bits
    return transform


def posterize_bits(level: float, _: Any) -> tuple[int]:
    """Bits to keep at RandAugment's levels 0 … 10: timm's, but at level 10 one, as Pillow refuses to keep none."""
    return (max(1, 4 - int(level / 10 * 4)),)


@dataclass(frozen=True)
class Share:
    """Which places of the stream one process reads, pass by pass. Iterated, not listed: runs are long."""

    batch_size: int
    steps: range
    accumulate: int = 1
    process: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        if self.accumulate < 1 or self.batch_size % (self.accumulate * self.processes):
            raise InputError(
                f"a batch of {self.batch_size} does not divide into {self.accumulate} parts for each of "
                f"{self.processes} processes; change batch_size or accumulate"
            )

    @property
    def rows(self) -> int:
        return self.batch_size // (self.accumulate * self.processes)

    def where(self) -> Iterator[tuple[int, int]]:
        """Step, and first row of its batch, of every pass."""
        for step in self.steps:
            for turn in range(self.accumulate):
                yield step, (turn * self.processes + self.process) * self.rows

    def __iter__(self) -> Iterator[list[int]]:
        for step, first in self.where():
            start = step * self.batch_size + first
            yield list(range(start, start + self.rows))


def parts(plan: Plan, share: Share, workers: int = 0) -> Iterator[Part]:
    """This process's parts of these steps, in order: `accumulate` for each step."""
    options: dict[str, Any] = {"num_workers": workers, "worker_init_fn": leave_interrupts_to_the_run}
    loader = DataLoader(plan, batch_sampler=share, pin_memory=torch.cuda.is_available(), **options)
    for (step, first), (images, labels, *more) in zip(share.where(), loader, strict=True):
        yield Part(step, first, share.batch_size, images, labels, **dict(zip([plan.more], more, strict=False)))


def leave_interrupts_to_the_run(_: int) -> None:
    """In a worker: Ctrl-C reaches every process, and the run still needs this step's images."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


VIEW_SEED = 0  # views are a data set of their own: runs with other seeds share them


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
        self, images: Images, recipe: DistilRecipe, data_config: dict[str, Any], weights: Tensor | None, folder: Path
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
        draw = np.random.default_rng([VIEW_SEED, Draw.MIX, number, view])
        if not recipe.mixup or draw.random() >= recipe.mix_share:
            return crop
        partner, share = int(draw.integers(len(self))), float(draw.beta(recipe.mixup, recipe.mixup))
        return torch.lerp(self.crop(partner, view), crop, share)

    def crop(self, number: int, view: int) -> Tensor:
        return self.augmented(number, VIEW_SEED, number, view)[0]


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


def views_folder(cache: Path, teacher: str, images: Mapping[str, Any], recipe: DistilRecipe) -> Path:
    """Where the views of these images by this teacher (its hash) are, in a cache that others may share."""
    names = ("views", "img_size", "crop_scale", "flip", "mixup", "mix_share", "depths", "precision")
    settings = {name: getattr(recipe, name) for name in names}
    settings |= {} if recipe.randaug is None else {"randaug": recipe.randaug}
    return cache / hash_json({"teacher": teacher, "images": dict(images), **settings})
