"""Timing models in turns: what follows from a clock that the test itself sets."""

import math

import pytest
import torch
from torch import nn

from paper import timing
from paper.timing import measure, median_interval, tokenizer_share
from spot.errors import InputError
from spot.models.tome import ToMe
from spot.models.wrappers import PatchDropout, PlainViT
from tests.conftest import make_nano
from tests.evaluation.test_throughput import Clock


def test_a_slow_spell_of_the_machine_does_not_change_the_ratio(monkeypatch):
    clock, calls, rate = Clock(monkeypatch), [], [1, 9, 9, 1, 5]

    class Timed(nn.Module):
        """Whatever slows the machine slows both calls of a round."""

        def __init__(self, model, seconds):
            super().__init__()
            self.model, self.seconds, self.spot_vit, self.tokens = model, seconds, model.spot_vit, model.tokens

        def forward(self, images):
            clock.now += self.seconds * rate[len(calls) // 2 % 5]
            calls.append(self)
            return self.model(images)

    model = make_nano()
    monkeypatch.setattr(timing, "macs", lambda *_: 1)
    models = {"slow": Timed(PlainViT(model), 3.0), "fast": Timed(PlainViT(model), 1.0)}
    slow, fast = measure(models, batch_sizes=[4], rounds=5, warm_up=0, shape=(3, 32, 32))
    assert (slow["speed-up"], fast["speed-up"]) == (1.0, pytest.approx(3.0))
    assert fast["images/s"] == pytest.approx(4 / 5)  # the median round took five seconds


def test_rows_carry_cost_beside_speed():
    model = make_nano()
    models = {"vit": PlainViT(model), "dropped": PatchDropout(model, 4), "merged": ToMe(model, tokens=6)}
    rows = measure(models, batch_sizes=(1, 3), rounds=2, warm_up=1)
    assert [(row["model"], row["batch"]) for row in rows] == [(name, batch) for batch in (1, 3) for name in models]
    assert rows[0]["MAC ratio"] == rows[0]["speed-up"] == 1.0
    assert all(row["speed-up low"] <= row["speed-up"] <= row["speed-up high"] for row in rows)
    assert rows[1]["MAC ratio"] == pytest.approx(rows[0]["GMACs"] / rows[1]["GMACs"])
    assert rows[1]["MAC ratio"] > 3
    assert [row["tokens"] for row in rows[:3]] == [16, 4, 6]
    assert all(row["images/s"] > 0 for row in rows)


def test_the_interval_of_the_median_holds_what_a_table_of_the_sign_test_says():
    # From tables (Conover): of 11 values the 2nd and 10th hold the median with 98.8 %, the 3rd and 9th with 93.5 %.
    assert median_interval([*range(11, 0, -1)]) == (2, 10)
    assert median_interval([*range(1, 21)]) == (6, 15)  # 95.9 %
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([5.0]) == (5.0, 5.0)


def test_nineteen_intervals_of_twenty_hold_the_median():
    draws = torch.rand(2000, 11, generator=torch.Generator().manual_seed(0)).exp()
    held = [low <= math.exp(0.5) <= high for low, high in map(median_interval, draws.tolist())]
    assert 0.95 <= sum(held) / len(held) <= 1.0


@pytest.mark.parametrize("kind", ["spot", "tome", "vit"])
def test_the_tokenizer_s_share_is_what_passes_before_the_first_block(kind, monkeypatch):
    clock, model = Clock(monkeypatch), make_nano()
    # The patch projection takes three seconds, every MLP one; there are two blocks.
    whole = {"spot": model, "tome": ToMe(model, r=2), "vit": PlainViT(model)}[kind]
    tokenize = model.tokenizer if kind == "spot" else model.vit.patch_embed
    tokenize.register_forward_hook(lambda *_: clock.work(3.0)(None))
    for block in model.vit.blocks:
        block.mlp.register_forward_hook(lambda *_: clock.work(1.0)(None))
    assert tokenizer_share(whole, torch.zeros(1, 3, 32, 32)) == pytest.approx(3 / 5)
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_what_cannot_be_timed_is_refused(monkeypatch):
    with pytest.raises(InputError, match="no model"):
        measure({})
    with pytest.raises(InputError, match="at least one round"):
        measure({"spot": make_nano()}, rounds=0)
    with pytest.raises(InputError, match="3 × 32 × 32 and 3 × 48 × 48"):
        measure({"small": make_nano(), "large": make_nano(img_size=48)})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.raises(InputError, match="one CPU thread"):
        measure({"spot": make_nano()}, clock="processor")
