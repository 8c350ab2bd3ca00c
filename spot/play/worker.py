"""One thread for everything that computes, in which the newest request wins.

A tab of the page (an owner) has slots, such as "predict" and "search". A request replaces what waits
in its slot and stops what runs there, so that nothing queues up behind a mouse that moves faster than
the model. Quick work goes first; long work reports between its steps and lets quick work through.
"""

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any

from spot.errors import InputError

Key = tuple[Hashable, str]


class Stopped(Exception):
    """Nobody waits for this work any more."""


class Job:
    """One request: `work(job)` calls `job.send` for every answer and `job.rest` between its steps."""

    def __init__(
        self, work: Callable[["Job"], None], send: Callable[[dict[str, Any]], None], *, long: bool = False
    ) -> None:
        self.work, self.long, self.stopped = work, long, False
        self._send = send
        self._worker: Worker | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Answer, unless the request was replaced or cancelled meanwhile: then raise Stopped."""
        if self.stopped:
            raise Stopped
        self._send(message)

    def rest(self) -> None:
        """Let quick work of all tabs through; raises Stopped when this work is no longer wanted."""
        if self._worker is not None:
            self._worker.run_quick()
        if self.stopped:
            raise Stopped

    def run(self, worker: "Worker") -> None:
        """Do the work; what goes wrong is told in a sentence."""
        self._worker = worker
        try:
            self.work(self)
        except Stopped:
            pass
        except InputError as error:
            self._send({"error": str(error)})
        except Exception as error:
            logging.getLogger("spot.play").exception("a request failed")
            self._send({"error": f"this did not work ({type(error).__name__}: {error}); the terminal says more"})


class Worker:
    """The thread. `submit`, `stop` and `close` may be called from any other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Key, Job] = {}
        self._running: dict[Key, Job] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="spot play", daemon=True)
        self._thread.start()

    def submit(self, owner: Hashable, slot: str, job: Job) -> None:
        """Run a job when its turn comes, instead of whatever waits or runs in this slot."""
        with self._changed:
            self._stop((owner, slot))
            self._waiting[owner, slot] = job  # a replaced job leaves its place in the line
            self._changed.notify()

    def stop(self, owner: Hashable, slot: str | None = None) -> None:
        """Forget what an owner waits for, in one slot or in all."""
        with self._changed:
            for key in [*self._waiting, *self._running]:
                if key[0] == owner and slot in (None, key[1]):
                    self._stop(key)
                    self._waiting.pop(key, None)

    def close(self) -> None:
        """Stop everything and end the thread."""
        with self._changed:
            self._closed = True
            for key in [*self._waiting, *self._running]:
                self._stop(key)
            self._waiting.clear()
            self._changed.notify()
        self._thread.join(timeout=10)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        with self._changed:
            return bool(self._waiting or self._running)

    def run_quick(self) -> None:
        """Run the quick jobs that wait; called by a long one between its steps."""
        while (taken := self._take(quick=True)) is not None:
            self._perform(*taken)

    def _stop(self, key: Key) -> None:
        for jobs in (self._waiting, self._running):
            if key in jobs:
                jobs[key].stopped = True

    def _take(self, *, quick: bool) -> tuple[Key, Job] | None:
        with self._changed:
            order = sorted(self._waiting, key=lambda key: self._waiting[key].long)  # stable: first come first served
            if not order or (quick and self._waiting[order[0]].long):
                return None
            job = self._running[order[0]] = self._waiting.pop(order[0])
            return order[0], job

    def _perform(self, key: Key, job: Job) -> None:
        try:
            job.run(self)
        finally:
            with self._changed:
                if self._running.get(key) is job:
                    del self._running[key]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
            if (taken := self._take(quick=False)) is not None:
                self._perform(*taken)
