"""Training batches: the order and the augmentation of images, as a function of the seed.

Training images form an endless stream of epochs, each in a new order. Step s with batch size G uses images
s·G … s·G + G − 1. Each batch is split first into accumulation passes, then across processes.
"""

import copy
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from spot.training.recipes import Recipe

SCENES_PER_EPOCH = 8192


class MicroBatch(NamedTuple):
    """The images of one process for one backward pass."""

    step: int
    first: int  # index of images[0] in the step's batch
    batch_size: int  # images in the step's batch
    images: Tensor  # (b, C, H, W)
    labels: Tensor  # (b,), -1 for unlabelled images

    def select(self, drawn: Tensor) -> Tensor:
        """Select this micro-batch's rows (b, …) from random numbers drawn for the step's whole batch."""
        return drawn[self.first : self.first + len(self.images)]


class TrainingStream(Dataset[tuple[Tensor, ...]]):
    """The stream as a map-style data set: item p is image order(epoch)[p mod M], augmented for that epoch."""

    weights: Tensor | None = None  # sampling weights of the images. None: an epoch uses each image once

    def __init__(self, images: Images, recipe: Recipe, data_config: dict[str, Any]) -> None:
        self.images, self.seed = copy.copy(images), recipe.seed
        self.images.transform = training_transform(recipe, data_config)
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.images)

    def order(self, epoch: int) -> list[int]:
        """Image indices of an epoch: a permutation, or drawn in proportion to the weights."""
        if self._order[0] != epoch:
            draw = generator(self.seed, Draw.ORDER, epoch)
            if self.weights is None:
                numbers = torch.randperm(len(self), generator=draw)
            else:
                numbers = torch.multinomial(self.weights, len(self), replacement=True, generator=draw)
            self._order = (epoch, numbers.tolist())
        return self._order[1]

    def __getitem__(self, index: int) -> Any:
        epoch, place = divmod(index, len(self))
        number = self.order(epoch)[place]
        with seeded(self.seed, Draw.CROP, index):
            sample: Any = self.images[number]  # never None: an unreadable image raises InputError
        return sample[:2]


class SceneStream(TrainingStream):
    """The built-in scenes as a stream: item p is scene p, so scenes never repeat."""

    def __init__(self, scenes: Scenes, data_config: dict[str, Any]) -> None:
        self.epoch = len(scenes)
        self.scenes = copy.copy(scenes)
        self.scenes.length = 2**62
        self.scenes.transform = Normalize(data_config["mean"], data_config["std"])

    def __len__(self) -> int:
        return self.epoch

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Images and labels. Drawing scenes in one batch is many times faster."""
        batch = self.scenes.draw(indices)
        return list(zip(batch.images, batch.labels.tolist(), strict=True))


def training_transform(recipe: Recipe, data_config: dict[str, Any]) -> Any:
    """timm's training transform: random resized crop, flip, RandAugment, and the model's normalisation."""
    augment = recipe.randaug and "rand-m{}-mstd{}-inc1".format(*recipe.randaug)
    transform = create_transform(
        recipe.img_size,
        is_training=True,
        scale=recipe.crop_scale,
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
    """Bits to keep at RandAugment levels 0 … 10, as in timm, but at least one: Pillow rejects 0."""
    return (max(1, 4 - int(level / 10 * 4)),)


@dataclass(frozen=True)
class MicroBatchSampler:
    """A batch sampler: the stream indices of one process for each backward pass."""

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

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.batch_size // (self.accumulate * self.processes)
        for step in self.steps:
            for turn in range(self.accumulate):
                start = step * self.batch_size + (turn * self.processes + self.process) * rows
                yield list(range(start, start + rows))


def micro_batches(stream: TrainingStream, sampler: MicroBatchSampler, workers: int = 0) -> Iterator[MicroBatch]:
    """The micro-batches of a process, in order: `accumulate` of them per step."""
    options: dict[str, Any] = {"num_workers": workers, "worker_init_fn": ignore_interrupts}
    loader = DataLoader(stream, batch_sampler=sampler, pin_memory=torch.cuda.is_available(), **options)
    for indices, batch in zip(sampler, loader, strict=True):
        step, first = divmod(indices[0], sampler.batch_size)
        yield MicroBatch(step, first, sampler.batch_size, *batch)


def ignore_interrupts(_: int) -> None:
    """Ignore Ctrl-C in a data worker, because the run still needs images to finish its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
