"""Timing models in turns: what follows from a clock that the test itself sets."""

import pytest
from torch import nn

from paper import timing
from paper.timing import median_interval, timed
from spot.evaluation import throughput
from spot.models.wrappers import PlainViT
from tests.conftest import make_nano


def test_a_slow_spell_of_the_machine_does_not_change_the_ratio(make_lab, monkeypatch):
    now, calls, rate = [0.0], [], [1, 9, 9, 1, 5]
    monkeypatch.setitem(throughput.CLOCKS, "processor", lambda: now[0])
    for name, value in (("ROUNDS", 5), ("WARM_UP", 0), ("BATCH", {"cpu": 4}), ("macs", lambda *_: 1)):
        monkeypatch.setattr(timing, name, value)

    class Timed(nn.Module):
        """Whatever slows the machine slows both calls of a round."""

        def __init__(self, model, seconds):
            super().__init__()
            self.model, self.seconds, self.spot_vit = model, seconds, model.spot_vit

        def forward(self, images):
            now[0] += self.seconds * rate[len(calls) // 2 % 5]
            calls.append(self)

    model = PlainViT(make_nano())
    rows = timed(make_lab(["one"]), {"slow": Timed(model, 3.0), "fast": Timed(model, 1.0)})
    assert rows["slow"]["speed-up"] == 1.0
    assert rows["fast"]["speed-up"] == rows["fast"]["single"] == pytest.approx(3.0)
    assert rows["fast"]["images/s"] == pytest.approx(4 / 5)  # the median round took five seconds


def test_the_interval_of_the_median_holds_what_a_table_of_the_sign_test_says():
    # From tables (Conover): of 11 values the 2nd and 10th hold the median with 98.8 %, the 3rd and 9th with 93.5 %.
    assert median_interval([*range(11, 0, -1)]) == (2, 10)
    assert median_interval([*range(1, 21)]) == (6, 15)  # 95.9 %
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([5.0]) == (5.0, 5.0)
