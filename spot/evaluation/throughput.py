"""Timing: models run in turns in one process, because absolute times say little on a shared machine.

Where other programs compete for the processor, one thread timed by the processor time it used is
steadier by far than by the clock on the wall.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch._dynamo
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

    images: the same in every round, or a function that gives the batches of a round, of which the mean counts.
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


def many_graphs() -> Any:
    """Let torch.compile keep a graph for every model: past eight of a kind it would go back to eager unasked."""
    return torch._dynamo.config.patch(recompile_limit=1000)


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """So many CPU threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        if count < 1:
            raise InputError(f"at least one thread is needed, got {count}")
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
