"""Named random draws, so that nothing about chance has to be saved.

A draw is named by a seed, what is drawn (`Draw`) and whole numbers, such as the epoch and the image of
an augmentation, always in this order. A run that was killed and resumed, another number of workers or
another number of processes therefore sees the same images, crops and positions. To add a draw, give it
a number of its own in `Draw`.

What is drawn for one image of a data set is named by the image's key instead: `generator_for`.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, unique

import numpy as np
import torch
from torch import Generator


@unique
class Draw(IntEnum):
    """What is drawn. The numbers are part of every result: they never change."""

    ORDER = 1  # in which order an epoch visits the images
    CROP = 2  # an image's augmentation
    PLACE = 11  # positions
    MIX = 12  # mixup and cutmix
    BUDGET = 13  # a step's budget and prior
    DROP = 14  # drop path
    SHARE = 15  # the rows that a budget of the distillation gets
    SHOW = 16  # the tokens that a masked autoencoder sees
    DECODER = 17  # the decoder's first weights
    SCALE = 18  # sizes of windows
    NEAR = 19  # squares around the object, and tokens in them
    HEAD = 21  # a new classifier's weights
    WEIGHTS = 22  # a new model's weights


def generator(seed: int, draw: Draw, *numbers: int) -> Generator:
    """A generator on the CPU for this draw."""
    return torch.Generator().manual_seed(_mixed(seed, draw, *numbers))


def generator_for(seed: int, key: str) -> Generator:
    """The random numbers of one image: the same in every batch, order and process."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode(errors="surrogateescape")).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


@contextmanager
def seeded(seed: int, draw: Draw, *numbers: int) -> Iterator[None]:
    """Within the block the global generators of Python, NumPy and torch are those of this draw.

    timm's augmentations, its mixup and drop path use them. Afterwards they are as they were.
    """
    mixed = _mixed(seed, draw, *numbers)
    python, array = random.getstate(), np.random.get_state()
    # A worker process has no business with the GPU, and may not touch it.
    on_gpu = torch.cuda.is_available() and torch.utils.data.get_worker_info() is None
    with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        torch.manual_seed(mixed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


def _mixed(*numbers: int) -> int:
    """One seed of 63 bits from several whole numbers; near ones give unrelated seeds."""
    low, high = np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(2)
    return int(low) | (int(high) >> 1) << 32
