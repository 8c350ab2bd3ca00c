"""Work that is disturbed: killed before each of its file operations, raced, and given too small a disk."""

import os
import random
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.faults.harness import Killed, Process, Tally, apart, kill_before, outcome_of
from tests.faults.jobs import Job


def kills(name: str, job: Job, tally: Tally, room: Path, *, every: int = 1, first: int = 1) -> int:
    """Kill before operation `first`, `first + every`, …; each time start again and compare. Gives the last one."""
    right = apart(lambda: job(fresh(room / "right")))
    assert isinstance(right, str), right
    number = first
    while True:
        folder = fresh(room / "killed")
        answer = apart(partial(job, folder), kill_before(number, folder))
        if not isinstance(answer, Killed):
            return number
        again = apart(partial(job, folder))
        left = [path.name for path in folder.rglob(".*")]
        outcome = outcome_of(again, right)
        if outcome == "refused":
            outcome = f"the same work was refused after a kill: {again}"
        elif outcome == "fine" and left:
            outcome = f"left behind: {left}"
        tally.count(f"kill: {name}", outcome, f"before operation {number}")
        number += every


def races(name: str, job: Job, tally: Tally, room: Path, count: int, seed: int = 0) -> None:
    """Two processes do the same in one folder: each finishes right or is told; afterwards the folder is whole."""
    right = apart(lambda: job(fresh(room / "right")))
    draw = random.Random(seed)
    for number in range(count):
        folder = fresh(room / "raced")
        processes = [Process(partial(delayed, job, folder, draw.random() * 0.3)) for _ in range(2)]
        answers = [process.end() for process in processes]
        ends = [outcome_of(answer, right) for answer in answers]
        if "fine" not in ends:
            ends.append(f"neither finished: {answers}")
        bad = [end for end in ends if end not in ("fine", "refused")]
        tally.count(f"race: {name}", bad[0] if bad else "fine", f"race {number}")


def delayed(job: Job, folder: Path, wait: float) -> str:
    time.sleep(wait)
    return job(folder)


def full_disks(name: str, job: Job, tally: Tally, room: Path, sizes: list[int]) -> None:
    """A tmpfs of few kilobytes: one sentence that names a file; with more room the same work goes on."""
    right = apart(lambda: job(fresh(room / "right")))
    for size in sizes:
        disk = fresh(room / "disk")
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=True)
        try:
            folder = disk / "work"
            folder.mkdir()
            answer = apart(partial(job, folder))
            outcome = outcome_of(answer, right)
            if outcome == "refused" and "cannot write" not in str(answer):
                outcome = f"another sentence: {answer}"
            tally.count(f"full disk: {name}", outcome, f"{size} KiB")
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            again = outcome_of(apart(partial(job, folder)), right)
            again = "refused though there is room" if again == "refused" else again
            tally.count(f"full disk, then room: {name}", again, f"{size} KiB")
        finally:
            subprocess.run(["umount", disk], check=True)


def may_mount() -> bool:
    """Whether this process may mount a tmpfs."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
        return True


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder
