"""The speed of models in studies. All models take turns in one run.

On a CPU the processor time of one thread is measured, which is stable on a busy machine; on other devices wall time.
Times are never cached, because both times of a ratio must come from the same run.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from scipy.stats import binom

from paper.lab import Lab
from paper.study import Row, Table
from spot import report
from spot.evaluation.cost import image_shape, macs
from spot.evaluation.throughput import Clock, cpu_threads, interleaved
from spot.models.wrappers import TokenModel

ROUNDS, WARM_UP = 11, 2
BATCH = {"cpu": 32}  # images per batch; other devices need LARGE_BATCH to be busy
LARGE_BATCH = 256


def timed(lab: Lab, models: Mapping[str, TokenModel]) -> dict[str, Row]:
    """The speed of each model by name, at a large batch: speed-up over the first model (the median over rounds, with
    its interval), MACs, and images per second. `single` is the speed-up at batch 1, with its interval."""

    @torch.no_grad()
    def call(clock: Clock, batch: int) -> dict[str, Row]:
        ready: dict[str, Any] = {name: model.eval() for name, model in models.items()}
        first, model = next(iter(models.items()))
        parameter, costs = next(model.parameters()), {name: macs(each) for name, each in models.items()}
        rows: dict[str, Row] = {
            name: {"GMACs": cost / 1e9, "MAC ratio": costs[first] / cost, "batch": batch}
            for name, cost in costs.items()
        }
        with report.progress(shown=True) as bar:
            task = bar.add_task("timing", total=2 * ROUNDS)
            for count, name, ends in ((1, "single", "single"), (batch, "speed-up", "speed")):
                noise = torch.randn(count, *image_shape(model), generator=torch.Generator().manual_seed(0))
                images = noise.to(parameter.device, parameter.dtype)
                interleaved(ready, images, WARM_UP)
                seconds = interleaved(ready, images, ROUNDS, clock, lambda: bar.advance(task))
                for each, times in seconds.items():
                    ratios = [one / other for one, other in zip(seconds[first], times, strict=True)]
                    low, high = median_interval(ratios)
                    rows[each] |= {name: median(ratios), f"{ends}_low": low, f"{ends}_high": high}
                    rows[each]["images/s"] = count / median(times)  # of the large batch, which comes last
        return rows

    return in_first_process(lab, call)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median for any distribution: two order statistics, symmetric in rank.

    Fewer than six values cannot reach 95 %, and the result is then their minimum and maximum.
    """
    ordered = sorted(values)
    inset = max(0, int(binom.ppf(0.025, len(ordered), 0.5)) - 1)  # each value is above the median by a coin's toss
    return ordered[inset], ordered[-1 - inset]


def in_first_process(lab: Lab, call: Callable[[Clock, int], Any]) -> Any:
    """The result of call(clock, batch) in the first process; the others wait, so that they do not disturb it."""
    result: list[Any] = [None]
    if lab.main:
        given = timing_method(lab)
        with cpu_threads(given["threads"]):
            result = [call(given["clock"], given["batch"])]
    if lab.state.num_processes > 1:
        broadcast_object_list(result)
    return result[0]


def timing_method(lab: Lab) -> dict[str, Any]:
    """How times are measured, for a result's settings."""
    device = lab.state.device.type
    threads, clock = (1, "processor") if device == "cpu" else (None, "wall")
    batch = BATCH.get(device, LARGE_BATCH)
    return {"device": device, "threads": threads, "clock": clock, "batch": batch, "rounds": ROUNDS}


def timing_note(lab: Lab) -> str:
    """The same as a sentence."""
    given = timing_method(lab)
    clock = "processor time of one thread" if given["clock"] == "processor" else f"the clock, on {given['device']}"
    return (
        f"Speed-ups are medians over {ROUNDS} rounds in turns in one run, batches of {given['batch']} and of 1, by "
        f"{clock}; intervals are 95 % (order statistics). † above the ratio of multiply-adds: it owes that part to the "
        "machine (what fits into its caches), not to the method."
    )


def speed_cell(row: Row) -> str:
    """A speed-up for tables, with its batch, and † if it exceeds the MAC ratio: 3.31×† (3.20–3.40) at 32."""
    interval = f" ({row['speed_low']:.2f}–{row['speed_high']:.2f})" if "speed_low" in row else ""
    above = "†" if row["speed-up"] > row.get("MAC ratio", row["speed-up"]) else ""
    return f"{row['speed-up']:.2f}×{above}{interval}" + (f" at {row['batch']}" if "batch" in row else "")


def single_cell(row: Row) -> str:
    """The same for batch 1."""
    return f"{row['single']:.2f}× ({row['single_low']:.2f}–{row['single_high']:.2f})" if "single" in row else ""


COLUMNS: Table = {
    "speed-up": speed_cell,
    "batch 1": single_cell,
    "by MACs": lambda row: f"{row['MAC ratio']:.2f}×" if "MAC ratio" in row else "",
}
