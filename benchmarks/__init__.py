"""Speed and memory, always as ratios measured in one run: `python -m benchmarks [NAME …]` or `make bench`."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile


def ratio(seconds: Mapping[Any, Sequence[float]], other: Any, ours: Any) -> float:
    """The other's time divided by ours in the same round, median over rounds."""
    return median(a / b for a, b in zip(seconds[other], seconds[ours], strict=True))


def peak(call: Callable[[Any], Any], images: Any) -> int:
    """The largest sum of allocations and releases during a call, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call(images)
    recorder = profiler.profiler
    assert recorder is not None and recorder.kineto_results is not None
    held = most = 0
    for event in sorted(recorder.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
