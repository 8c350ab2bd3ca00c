"""Times for studies: models in turns, in one run, the same way in every study.

On a CPU one thread is timed by the processor time it used, because that is steady on a machine that
does other work too; elsewhere by the clock. Times are never kept: a ratio is only as good as the
run that both of its times come from.
"""

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import broadcast_object_list

from spot.evaluation.throughput import Clock, measure, threads
from spot.models.protocol import TokenModel
from spot.studies.lab import Lab

ROUNDS = 11
BATCH = {"cpu": 32}  # images at a time; elsewhere a device is only busy with more
OTHERWISE = 256


def timed(lab: Lab, models: Mapping[str, TokenModel], rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """`measure`'s row for each model by its name; ratios are to the first."""

    def call(clock: Clock, batch: int) -> list[dict[str, Any]]:
        return measure(models, batch_sizes=[batch], rounds=rounds, clock=clock, shown=True)

    return {row["model"]: row for row in alone(lab, call)}


def alone(lab: Lab, call: Callable[[Clock, int], Any]) -> Any:
    """What call(clock, batch) returns in the first process; the others wait, they would disturb it."""
    result: list[Any] = [None]
    if lab.main:
        given = about(lab)["timing"]
        with threads(given["threads"]):
            result = [call(given["clock"], given["batch"])]
    if lab.state.num_processes > 1:
        broadcast_object_list(result)
    return result[0]


def speed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a timing that tables show: speed-up with its interval, MAC ratio, images a second."""
    ends = {"speed_low": row["speed-up low"], "speed_high": row["speed-up high"]}
    return {"speed-up": row["speed-up"], **ends, **{name: row[name] for name in ("MAC ratio", "GMACs", "images/s")}}


def shown(row: Mapping[str, Any]) -> str:
    """A speed-up as tables show it: 3.31× (3.20–3.40)."""
    interval = f" ({row['speed_low']:.2f}–{row['speed_high']:.2f})" if "speed_low" in row else ""
    return f"{row['speed-up']:.2f}×{interval}"


def shown_macs(row: Mapping[str, Any]) -> str:
    return f"{row['MAC ratio']:.2f}×" if "MAC ratio" in row else ""


def about(lab: Lab, rounds: int = ROUNDS) -> dict[str, Any]:
    """How times were taken, for a result's settings."""
    device = lab.state.device.type
    one = device == "cpu"
    how = {
        "threads": 1 if one else None,
        "clock": "processor" if one else "wall",
        "batch": BATCH.get(device, OTHERWISE),
    }
    return {"timing": {"device": device, **how, "rounds": rounds}}


def how(lab: Lab, rounds: int = ROUNDS) -> str:
    """The same as a sentence."""
    given = about(lab, rounds)["timing"]
    clock = "processor time of one thread" if given["clock"] == "processor" else f"the clock, on {given['device']}"
    return (
        f"Speed-ups are medians over {rounds} rounds in turns in one run, batches of {given['batch']}, by {clock}; "
        "intervals are 95 % (order statistics)."
    )
