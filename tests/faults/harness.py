"""How faults are made and counted: work in a process of its own that is killed, starved or timed, and how it ended.

A case ends well if the work returns something right or raises an InputError of one line. Everything
else is a fault: another exception, a hang, a wrong result, NaN from finite input.
"""

import hashlib
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from spot.errors import InputError

MEMORY, SECONDS = 12 << 30, 120  # of a process; torch alone reserves several GB of addresses
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "fcntl.flock")
FORK = get_context("fork")


@dataclass
class Tally:
    """Cases by name, how they ended, and the faults among them."""

    cases: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def count(self, name: str, outcome: str, about: str = "") -> None:
        """outcome: "fine", "refused" (with a sentence), or what went wrong."""
        self.cases[name] += 1
        if outcome == "refused":
            self.refused[name] += 1
        elif outcome != "fine":
            self.faults.append(f"{name}: {about}: {outcome}")
            print("FAULT", self.faults[-1], flush=True)

    def check(self, name: str, work: Callable[[], Any], about: str = "") -> None:
        """Count one call in this process; `work` raises AssertionError for a wrong result."""
        try:
            work()
        except InputError as error:
            self.count(name, "refused" if "\n" not in str(error) else "a sentence of several lines", about)
        except Exception as error:
            self.count(name, located(error), about)
        else:
            self.count(name, "fine", about)


def located(error: BaseException) -> str:
    """An exception and where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"


@dataclass(frozen=True)
class Killed:
    by: int


class Process:
    """A forked process that works. (No threads: a fork copies the locks they hold.)"""

    def __init__(self, work: Callable[[], Any], before: Callable[[], None] | None = None) -> None:
        self.answers, sender = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=partial(answer, work, before, sender))
        self.process.start()
        sender.close()

    def end(self) -> Any:
        """What the work returned, or the exception it raised; Killed if it was killed."""
        try:
            answer = self.answers.recv()
        except EOFError:
            answer = None
        self.process.join()
        code = self.process.exitcode or 0
        return Killed(-code) if code < 0 else answer


def answer(work: Callable[[], Any], before: Callable[[], None] | None, sender: Any) -> None:
    """In the process: do the work and send its result."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        signal.alarm(SECONDS)
        if before is not None:
            before()
        result: Any = work()
    except BaseException as error:
        result = error if isinstance(error, (InputError, AssertionError)) else RuntimeError(located(error))
    sender.send(result)
    sender.close()


def apart(work: Callable[[], Any], before: Callable[[], None] | None = None) -> Any:
    """What `work` returns in a forked process, or the exception it raises; Killed if it was killed."""
    return Process(work, before).end()


def outcome_of(answer: Any, expected: Any) -> str:
    """How a case ended whose right answer is known."""
    if isinstance(answer, InputError):
        return "refused"
    if isinstance(answer, Killed):
        return "a hang" if answer.by == signal.SIGALRM else f"killed by signal {answer.by}"
    if isinstance(answer, BaseException):
        return f"{type(answer).__name__}: {answer}"
    return "fine" if answer == expected else f"a wrong result, {answer!r:.80} instead of {expected!r:.80}"


def kill_before(number: int, folder: Path) -> Callable[[], None]:
    """Called in a process, kills it before its file operation of this number in the folder."""

    def install() -> None:
        seen, inside = [0], os.fsencode(folder)
        handles = ("fcntl.flock", "os.truncate")  # their argument may be a number

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in EVENTS or not arguments:
                return
            if isinstance(arguments[0], (str, bytes, os.PathLike)):
                if not os.fsencode(arguments[0]).startswith(inside):
                    return
            elif event not in handles:
                return
            seen[0] += 1
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    return install


def digest(*files: Path) -> str:
    """The content of files, all of which must exist."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
