"""Timing: models take turns in one process, because absolute times are unreliable on a shared machine.

If other programs compete for the processor, the processor time of one thread is far more stable
than wall time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from spot.errors import InputError

K = TypeVar("K")
Clock = Literal["wall", "processor"]
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def interleaved(
    models: Mapping[K, Callable[[Any], Any]],
    images: Tensor | Callable[[int], Sequence[Any]],
    rounds: int,
    clock: Clock = "wall",
    done: Callable[[], None] = lambda: None,
) -> dict[K, list[float]]:
    """Seconds of every model in every round. Each round begins with another model, so that none is always first.

    images: the same in every round, or a function that returns a round's batches, whose times are averaged.
    """
    names, now = list(models), CLOCKS[clock]
    seconds: dict[K, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        batches = [images] if isinstance(images, Tensor) else images(number)
        for name in names[turn:] + names[:turn]:
            spent = 0.0
            for batch in batches:
                wait_for(batch.device)
                start = now()
                models[name](batch)
                wait_for(batch.device)
                spent += now() - start
            seconds[name].append(spent / len(batches))
        done()
    return seconds


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Set the number of CPU threads, and restore it afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        if count < 1:
            raise InputError(f"at least one thread is needed, got {count}")
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
