"""One thread for all computation. The newest request in a slot replaces older ones.

A tab of the page (an owner) has slots, such as "predict" and "search". A request replaces the waiting
job of its slot and stops the running one, so that fast mouse moves do not build up a queue. Quick jobs
run first. Long jobs send results between their steps and let quick jobs run.
"""

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any

from spot.errors import InputError

Key = tuple[Hashable, str]


class Stopped(Exception):
    """The job was replaced or cancelled."""


class Job:
    """One request. `work(job)` calls `job.send` for each answer and `job.rest` between its steps."""

    def __init__(
        self, work: Callable[["Job"], None], send: Callable[[dict[str, Any]], None], *, long: bool = False
    ) -> None:
        self.work, self.answer, self.long, self.stopped = work, send, long, False
        self.worker: Worker | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Send an answer. Raises Stopped if the job was replaced or cancelled."""
        if self.stopped:
            raise Stopped
        self.answer(message)

    def rest(self) -> None:
        """Run the waiting quick jobs of all tabs. Raises Stopped if this job was replaced or cancelled."""
        if self.worker is not None:
            self.worker.run_quick()
        if self.stopped:
            raise Stopped


class Worker:
    """The thread. `submit`, `stop` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Key, Job] = {}
        self._running: dict[Key, Job] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="spot play", daemon=True)
        self._thread.start()

    def submit(self, owner: Hashable, slot: str, job: Job) -> None:
        """Queue a job, replacing the waiting or running job of this slot."""
        with self._changed:
            self._mark_stopped((owner, slot))
            self._waiting[owner, slot] = job  # takes the queue position of the job it replaces
            self._changed.notify()

    def stop(self, owner: Hashable, slot: str | None = None) -> None:
        """Stop an owner's jobs, in one slot or in all."""
        with self._changed:
            for key in [*self._waiting, *self._running]:
                if key[0] == owner and slot in (None, key[1]):
                    self._mark_stopped(key)
                    self._waiting.pop(key, None)

    def close(self) -> None:
        """Stop all jobs and end the thread."""
        with self._changed:
            self._closed = True
            for job in [*self._waiting.values(), *self._running.values()]:
                job.stopped = True
            self._waiting.clear()
            self._changed.notify()
        self._thread.join(timeout=10)

    @property
    def busy(self) -> bool:
        """Whether any job runs or waits."""
        with self._changed:
            return bool(self._waiting or self._running)

    def run_quick(self) -> None:
        """Run the waiting quick jobs. Long jobs call it between their steps."""
        while (taken := self._take(quick=True)) is not None:
            self._perform(*taken)

    def _mark_stopped(self, key: Key) -> None:
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
        """Do the work of a job. An error is sent as one sentence."""
        job.worker = self
        try:
            job.work(job)
        except Stopped:
            pass
        except InputError as error:
            job.answer({"error": str(error)})
        except Exception as error:
            logging.getLogger("spot.play").exception("a request failed")
            job.answer({"error": f"this did not work ({type(error).__name__}: {error}); the terminal shows more"})
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
