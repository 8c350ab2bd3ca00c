"""Chance as a function of where training stands, so that nothing about it has to be saved.

Every draw is named by whole numbers, such as (seed, epoch, image) for an augmentation or
(seed, step) for a budget. A run that was killed and resumed, another number of workers or
another number of processes therefore sees the same images, crops and positions.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Generator


def mixed(*numbers: int) -> int:
    """One seed of 63 bits from several whole numbers; near ones give unrelated seeds."""
    low, high = np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(2)
    return int(low) | (int(high) >> 1) << 32


def generator(*numbers: int) -> Generator:
    """A generator on the CPU for the draw named by these numbers."""
    return torch.Generator().manual_seed(mixed(*numbers))


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Within the block the global generators of Python, NumPy and torch are those of this draw.

    timm's augmentations, its mixup and drop path use them. Afterwards they are as they were.
    """
    seed = mixed(*numbers)
    python, array = random.getstate(), np.random.get_state()
    # A worker process has no business with the GPU, and may not touch it.
    on_gpu = torch.cuda.is_available() and torch.utils.data.get_worker_info() is None
    with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
