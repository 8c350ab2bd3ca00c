"""Named random draws: no random state has to be saved.

A draw is identified by a seed, a purpose (`Draw`) and integers such as the epoch and the image index,
always in this order. A resumed run, or one with other numbers of workers or processes, therefore sees
the same images, crops and positions. To add a draw, give it a new number in `Draw`.

Draws for one image of a data set are identified by the image's key instead: `generator_for`.
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
    """The purpose of a draw. Results depend on these numbers, so they never change."""

    ORDER = 1  # the order of images in an epoch
    CROP = 2  # an image's augmentation
    PLACE = 11  # positions
    MIX = 12  # mixup and cutmix
    BUDGET = 13  # a step's budget and prior
    DROP = 14  # drop path
    SHARE = 15  # the rows of a batch assigned to each budget in distillation
    SHOW = 16  # the tokens visible to a masked autoencoder
    DECODER = 17  # the decoder's initial weights
    SCALE = 18  # window sizes
    NEAR = 19  # squares around the object, and tokens in them
    HEAD = 21  # a new classifier's initial weights
    WEIGHTS = 22  # a new model's initial weights


def generator(seed: int, draw: Draw, *numbers: int) -> Generator:
    """The CPU generator of this draw."""
    return torch.Generator().manual_seed(_mixed(seed, draw, *numbers))


def generator_for(seed: int, key: str) -> Generator:
    """The CPU generator of one image, independent of batch, order and process."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode(errors="surrogateescape")).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


@contextmanager
def seeded(seed: int, draw: Draw, *numbers: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch for this draw, and restore them after the block.

    timm's augmentations, mixup and drop path use these generators.
    """
    mixed = _mixed(seed, draw, *numbers)
    python, array = random.getstate(), np.random.get_state()
    # A data-loading worker must not initialise the GPU.
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
    """Hash integers to one 63-bit seed. Similar integers give unrelated seeds."""
    low, high = np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(2)
    return int(low) | (int(high) >> 1) << 32
