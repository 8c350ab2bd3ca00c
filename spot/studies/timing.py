"""Times for studies: models in turns, in one run, the same way in every study.

On a CPU one thread is timed by the processor time it used, because that is steady on a machine that
does other work too; elsewhere by the clock. Times are never kept: a ratio is only as good as the
run that both of its times come from.
"""

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import broadcast_object_list

from spot.evaluation.throughput import Clock, cpu_threads, measure
from spot.models.protocol import TokenModel
from spot.studies.lab import Lab
from spot.studies.study import Row

ROUNDS = 11
BATCH = {"cpu": 32}  # images at a time; elsewhere a device is only busy with more
OTHERWISE = 256


def timed(lab: Lab, models: Mapping[str, TokenModel]) -> dict[str, Row]:
    """A row of speed for each model by its name: speed-up over the first, its interval, MACs, images a second.

    All at a large batch; `single` is the speed-up at one image at a time, with its interval.
    """

    def call(clock: Clock, batch: int) -> list[Row]:
        return measure(models, batch_sizes=[1, batch], rounds=ROUNDS, clock=clock, shown=True)

    large = {"speed-up": "speed-up", "speed-up low": "speed_low", "speed-up high": "speed_high"}
    large |= {name: name for name in ("MAC ratio", "GMACs", "images/s", "batch")}
    single = {"speed-up": "single", "speed-up low": "single_low", "speed-up high": "single_high"}
    rows: dict[str, Row] = {}
    for row in alone(lab, call):
        names = single if row["batch"] == 1 else large
        rows.setdefault(row["model"], {}).update({new: row[name] for name, new in names.items()})
    return rows


def alone(lab: Lab, call: Callable[[Clock, int], Any]) -> Any:
    """What call(clock, batch) returns in the first process; the others wait, they would disturb it."""
    result: list[Any] = [None]
    if lab.main:
        given = about(lab)["timing"]
        with cpu_threads(given["threads"]):
            result = [call(given["clock"], given["batch"])]
    if lab.state.num_processes > 1:
        broadcast_object_list(result)
    return result[0]


def shown(row: Row) -> str:
    """A speed-up as tables show it, with its batch and † where it is above the MAC ratio: 3.31×† (3.20–3.40) at 32."""
    interval = f" ({row['speed_low']:.2f}–{row['speed_high']:.2f})" if "speed_low" in row else ""
    above = "†" if row["speed-up"] > row.get("MAC ratio", row["speed-up"]) else ""
    return f"{row['speed-up']:.2f}×{above}{interval}" + (f" at {row['batch']}" if "batch" in row else "")


def shown_single(row: Row) -> str:
    """The same of one image at a time."""
    return f"{row['single']:.2f}× ({row['single_low']:.2f}–{row['single_high']:.2f})" if "single" in row else ""


def shown_macs(row: Row) -> str:
    return f"{row['MAC ratio']:.2f}×" if "MAC ratio" in row else ""


def about(lab: Lab) -> dict[str, Any]:
    """How times were taken, for a result's settings."""
    device = lab.state.device.type
    threads, clock = (1, "processor") if device == "cpu" else (None, "wall")
    batch = BATCH.get(device, OTHERWISE)
    return {"timing": {"device": device, "threads": threads, "clock": clock, "batch": batch, "rounds": ROUNDS}}


def how(lab: Lab) -> str:
    """The same as a sentence."""
    given = about(lab)["timing"]
    clock = "processor time of one thread" if given["clock"] == "processor" else f"the clock, on {given['device']}"
    return (
        f"Speed-ups are medians over {ROUNDS} rounds in turns in one run, batches of {given['batch']} and of 1, by "
        f"{clock}; intervals are 95 % (order statistics). † above the ratio of multiply-adds: it owes that part to the "
        "machine (what fits into its caches), not to the method."
    )
