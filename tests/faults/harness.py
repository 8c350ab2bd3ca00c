"""How faults are made and counted: work in a process of its own that is killed, starved or timed, and what came of it.

A case ends well if the work returns something right or raises an InputError of one line. Everything
else is a fault: another exception, a hang, a wrong result, NaN from finite input.
"""

import hashlib
import os
import pickle
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spot.errors import InputError

MEMORY, SECONDS = 12 << 30, 120  # of a process; torch alone reserves several GB of addresses
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "fcntl.flock")


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

    def check(self, name: str, work: Callable[[], Any], about: str = "") -> Any:
        """Count one call in this process; `work` raises AssertionError for a wrong result."""
        try:
            made = work()
        except InputError as error:
            self.count(name, "refused" if "\n" not in str(error) else "a sentence of several lines", about)
            return None
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.count(name, f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})", about)
            return None
        self.count(name, "fine", about)
        return made

    def add(self, other: "Tally") -> None:
        self.cases += other.cases
        self.refused += other.refused
        self.faults += other.faults


def apart(work: Callable[[], Any], *, seconds: float = SECONDS, before: Callable[[], None] | None = None) -> Any:
    """What `work` returns in a forked process, or the exception it raises; Killed if it was killed."""
    return ended(*begun(work, seconds=seconds, before=before))


def begun(
    work: Callable[[], Any], *, seconds: float = SECONDS, before: Callable[[], None] | None = None
) -> tuple[int, int]:
    """A process that works, and the pipe it will answer through. (No threads: a fork copies the locks they hold.)"""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
            signal.alarm(int(seconds))
            if before is not None:
                before()
            answer: Any = work()
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            known = isinstance(error, (InputError, AssertionError))
            answer = error if known else RuntimeError(f"{error!r:.300} ({where.filename}:{where.lineno})")
        with os.fdopen(theirs, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(theirs)
    return child, ours


def ended(child: int, answers: int) -> Any:
    """What a process answers at its end."""
    with os.fdopen(answers, "rb") as pipe:
        sent = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Killed(os.WTERMSIG(status))
    return pickle.loads(sent)


@dataclass(frozen=True)
class Killed:
    by: int


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
    """What is in files; that they are all there."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
