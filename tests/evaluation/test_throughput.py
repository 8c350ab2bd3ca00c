"""Timing: no absolute time is asserted, only what follows from a clock that the test itself sets."""

import pytest
import torch

from spot.errors import InputError
from spot.evaluation import throughput
from spot.evaluation.throughput import cpu_threads, interleaved


@pytest.fixture
def now(monkeypatch):
    """A clock that only moves when a test moves it."""
    now = [0.0]
    monkeypatch.setitem(throughput.CLOCKS, "wall", lambda: now[0])
    return now


def test_every_model_is_timed_once_in_every_round_and_each_begins_in_turn(now):
    order = []

    def model(name, seconds):
        def call(images):
            now[0] += seconds
            order.append(name)

        return call

    models = {name: model(name, seconds) for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 4.0))}
    seconds = interleaved(models, torch.zeros(1), rounds=4)
    assert seconds == {"a": [2.0] * 4, "b": [1.0] * 4, "c": [4.0] * 4}
    assert "".join(order) == "abcbcacababc"


def test_the_batches_of_a_round_are_averaged(now):
    def call(images):
        now[0] += len(images)

    batches = [[torch.zeros(1), torch.zeros(3)], [torch.zeros(5), torch.zeros(7)]]
    assert interleaved({"a": call}, lambda turn: batches[turn], rounds=2) == {"a": [2.0, 6.0]}


def test_threads_are_set_back():
    before = torch.get_num_threads()
    with cpu_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(InputError, match="at least one thread"), cpu_threads(0):
        pass
