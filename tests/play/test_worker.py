"""One thread in which the newest request wins."""

import threading
import time

import pytest

from spot.errors import InputError
from spot.play.worker import Job, Worker


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


def idle(worker: Worker) -> None:
    until = time.monotonic() + 10
    while worker.busy:
        assert time.monotonic() < until
        time.sleep(0.002)


class Held:
    """Work that runs in the worker until it is released, and then does something."""

    def __init__(self, worker: Worker, slot: str, then, *, send=print, long: bool = False) -> None:
        self.started, self.released, self.then = threading.Event(), threading.Event(), then
        worker.submit("tab", slot, Job(self.work, send, long=long))
        self.started.wait(10)

    def work(self, job: Job) -> None:
        self.started.set()
        self.released.wait(10)
        self.then(job)


def test_of_many_requests_only_the_running_and_the_newest_are_worked_on(worker):
    done = []
    held = Held(worker, "predict", lambda job: done.append(0))
    for number in range(1, 100):
        worker.submit("tab", "predict", Job(lambda job, number=number: done.append(number), print))
    held.released.set()
    idle(worker)
    assert done == [0, 99]


def test_quick_work_of_every_tab_goes_through_between_the_steps_of_long_work(worker):
    order = []

    def steps(job):
        for step in range(2):
            order.append(f"step {step}")
            job.rest()

    held = Held(worker, "search", steps, long=True)
    for tab in ("tab", "other tab"):
        worker.submit(tab, "predict", Job(lambda job, tab=tab: order.append(tab), print))
    held.released.set()
    idle(worker)
    assert order == ["step 0", "tab", "other tab", "step 1"]


@pytest.mark.parametrize("how", ["replaced", "stopped", "tab closed"])
def test_long_work_ends_at_its_next_step_when_nobody_wants_it(worker, how):
    sent = []

    def step(job):
        job.rest()
        job.send({"never": "seen"})

    held = Held(worker, "search", step, send=sent.append, long=True)
    if how == "replaced":
        worker.submit("tab", "search", Job(lambda job: job.send({"new": 1}), sent.append, long=True))
    else:
        worker.stop("tab", "search" if how == "stopped" else None)
    held.released.set()
    idle(worker)
    assert sent == ([{"new": 1}] if how == "replaced" else [])


def test_stopping_one_slot_or_tab_leaves_the_others(worker):
    sent = []
    held = Held(worker, "predict", lambda job: None)
    for owner, slot in (("tab", "a"), ("tab", "b"), ("other", "a")):
        worker.submit(owner, slot, Job(lambda job, at=(owner, slot): sent.append(at), print))
    worker.stop("tab", "a")
    held.released.set()
    idle(worker)
    assert sent == [("tab", "b"), ("other", "a")]


def test_what_goes_wrong_is_a_sentence_and_the_thread_lives_on(worker, caplog):
    sent = []

    def bad(job):
        raise InputError("positions must be finite")

    def bug(job):
        raise ZeroDivisionError("oh")

    for number, work in enumerate((bad, bug, lambda job: job.send({"fine": True}))):
        worker.submit(number, "predict", Job(work, sent.append))
    idle(worker)
    assert sent[0] == {"error": "positions must be finite"}
    assert "ZeroDivisionError: oh" in sent[1]["error"] and "ZeroDivisionError" in caplog.text
    assert sent[2] == {"fine": True}
