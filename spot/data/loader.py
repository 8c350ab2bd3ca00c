"""Batches of a data set, in its order: `for images, labels, keys in loader(data)`."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from spot.data.images import Data, Images, Sample, Unread
from spot.errors import InputError


class Batch(NamedTuple):
    """images (B, C, H, W), labels (B,) int64, and B keys."""

    images: Tensor
    labels: Tensor
    keys: list[str]


class Loader:
    """Batches of some indices of a data set. Skipped unreadable images make batches smaller.

    `seconds` is the duration of the last pass, `waited` the part of it that the consumer waited for data. `samples` is
    the number of samples, with the unreadable ones.
    """

    def __init__(self, dataset: Any, indices: Sequence[Any], workers: int = 0) -> None:
        """indices: one sequence for each batch."""
        self.data: Any = dataset.dataset if isinstance(dataset, Subset) else dataset
        self.skipped: list[str] = self.data.skipped if isinstance(self.data, Images) else []
        self.samples, self.waited, self.seconds = sum(map(len, indices)), 0.0, 0.0
        pin = torch.cuda.is_available()
        self.batches: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=indices, num_workers=workers, collate_fn=collate, pin_memory=pin
        )

    def __len__(self) -> int:
        return len(self.batches)  # for progress bars

    def __iter__(self) -> Iterator[Batch]:
        self.waited, self.seconds = 0.0, 0.0
        start = requested = time.perf_counter()
        for batch, unread in self.batches:
            self.waited += time.perf_counter() - requested
            for image in unread:
                self.data.note_unread(image)  # only Images yield an Unread
            if batch is not None:
                yield batch
            requested = time.perf_counter()
            self.seconds = requested - start


def collate(samples: Sequence[Sample | Unread]) -> tuple[Batch | None, list[Unread]]:
    """The readable samples as one batch (None if there are none), and the unreadable ones."""
    unread = [sample for sample in samples if isinstance(sample, Unread)]
    readable = [sample for sample in samples if not isinstance(sample, Unread)]
    if not readable:
        return None, unread
    images, labels, keys = zip(*readable, strict=True)
    if any(image.shape != images[0].shape for image in images):
        raise InputError("pictures of different sizes do not make a batch; use a batch size of 1 (--batch-size 1)")
    return Batch(torch.stack(images), torch.tensor(labels), list(keys)), unread


def loader(dataset: Data, batch_size: int = 64, workers: int = 0, *, process: int = 0, processes: int = 1) -> Loader:
    """Batches in the data's order, for one of several processes.

    Process p of P gets the samples p, p + P, p + 2P, …, so that each sample occurs exactly once, without padding.
    """
    if batch_size < 1:
        raise InputError(f"a batch needs at least one image, got a batch size of {batch_size}")
    indices = range(process, len(dataset), processes)
    starts = range(0, len(indices), batch_size)
    return Loader(dataset, [indices[start : start + batch_size] for start in starts], workers)


def available_workers() -> int:
    """The default number of workers: the number of cores minus one, at most eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores - 1)
