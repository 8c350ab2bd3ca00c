"""The long form: python -m tests.faults [--cases 20000] [--seed 0]. Ends with 1 if there is a fault."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.faults.calls import calls, command_line
from tests.faults.disturb import full_disks, kills, may_mount, races
from tests.faults.harness import Tally
from tests.faults.jobs import images, jobs
from tests.faults.mutations import formats, mutate


def campaign(cases: int, seed: int, room: Path) -> Tally:
    """About so many cases: a few hundred kills, races and full disks, the others half damaged files, half calls."""
    tally, began = Tally(), time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {sum(tally.cases.values()):6d} cases  {what}", flush=True)

    work = jobs(images(room / "pictures"))
    for name, job in work.items():
        kills(name, job, tally, room)
        say(f"killed: {name}")
    for name in ("search", "train"):
        races(name, work[name], tally, room, 10, seed)
        say(f"raced: {name}")
    if may_mount():
        for name, job in work.items():
            full_disks(name, job, tally, room, [1 << size for size in range(2, 11)])
        say("full disks")
    else:
        print("full disks are left out: no tmpfs can be mounted here")
    kinds = formats(room)
    each = cases // (2 * len(kinds)) + 1
    for name, good in kinds.items():
        mutate(name, good, tally, room, range(seed * each, (seed + 1) * each))
        say(f"damaged: {name}")
    verbs = cases // 20
    calls(tally, max(0, cases - sum(tally.cases.values()) - verbs) // 6 + 1)
    say("calls")
    command_line(tally, room, verbs)
    say("command line")
    return tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tally = campaign(given.cases, given.seed, Path(folder))
    for name in sorted(tally.cases):
        print(f"{name:36} {tally.cases[name]:6d} cases, {tally.refused[name]:6d} refused in a sentence")
    print(f"{sum(tally.cases.values())} cases, {len(tally.faults)} faults")
    sys.exit(bool(tally.faults))
