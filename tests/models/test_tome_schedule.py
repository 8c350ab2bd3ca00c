"""Schedules by hand, and their cost against torch's counter."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

import spot
from paper.backbone import vit_b16
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.models.tome import ToMe
from spot.models.tome_schedule import (
    blocks_macs,
    even,
    four_blocks,
    geometric,
    merge_share,
    resolve_schedule,
    schedule_for_macs,
    schedule_for_tokens,
)
from tests.conftest import make_nano
from tests.models.test_tome import KINDS, SMALL, pictures


@pytest.fixture(scope="module")
def deep():
    return make_nano(depth=12, img_size=112)  # a grid of 196


def test_schedules_by_hand():
    assert resolve_schedule(16, 196, 12) == [16] * 11 + [10]  # the paper's r, which merges half of the last 20
    assert even(8, 100, 3) == [3, 3, 2]
    assert even(60, 20, 3) == [10, 5, 2]  # never more than half
    assert geometric(0.75, 30, 100, 6) == [25, 19, 14, 10, 2, 0]  # 75, 56, 42, 32, 30, 30
    assert geometric(0.3, 1, 20, 3) == [10, 5, 2]
    assert geometric(1.0, 1, 20, 3) == [0, 0, 0]
    assert merge_share(0.83, range(3, 12), 196, 12) == [0, 0, 0] + [18] * 9  # 162.7 of 196, in nine blocks
    assert merge_share(1.0, range(2, 4), 10, 4) == [0, 0, 5, 2]
    assert merge_share(0.7, four_blocks(12), 37, 12) == [0, 0, 0, 6, 6, 0, 6, 0, 6, 0, 0, 0]  # 25.9 of 37
    assert merge_share(0.0, four_blocks(12), 10, 12) == [0] * 12
    assert four_blocks(24) == {6, 8, 12, 16} and four_blocks(2) == {0, 1}


def test_every_token_count_can_be_reached_exactly(deep):
    for target in range(1, 197):
        assert ToMe(deep, schedule_for_tokens(deep, target)).tokens == target


@pytest.mark.parametrize(("target", "message"), [(0, "1 to 36"), (37, "1 to 36"), (3, "at most half leave 5 of 36")])
def test_token_counts_out_of_reach_are_refused(target, message):
    with pytest.raises(InputError, match=message):
        schedule_for_tokens(make_nano(**SMALL), target)


@pytest.mark.parametrize("kind", KINDS)
def test_multiply_adds_are_those_torch_counts(kind):
    model = make_nano(**KINDS[kind])
    images, positions = pictures(model, 1), model.grid()[None]

    def counted(call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops() // 2

    tome = ToMe(model, [5, 0, 9])
    embedding = counted(lambda: model.embed(images, positions))
    blocks = counted(lambda: tome.forward_features(images, positions)) - embedding
    assert blocks_macs(model, 36, [5, 0, 9]) == blocks


def test_multiply_adds_of_vit_b16_are_the_published_ratios():
    """Bolya et al.'s r on ViT-B/16 at 224 with their code: 1.34, 1.70 and 2.02 times fewer multiply-adds."""
    model = vit_b16()
    ratios = [macs(model, tokens=196) / macs(ToMe(model, r)) for r in (8, 13, 16)]
    assert ratios == pytest.approx([1.34, 1.70, 2.02], abs=0.02)


def test_a_schedule_for_multiply_adds_just_reaches_them():
    model = spot.adapt("vit_tiny_patch16_224")
    for tokens in (49, 100, 150):
        budget = blocks_macs(model, tokens)
        schedule = schedule_for_macs(model, budget)
        assert 0.97 * budget < blocks_macs(model, 196, schedule) <= budget
        assert blocks_macs(model, 196, even(sum(schedule) - 1, 196, 12)) > budget  # one merge fewer
    assert schedule_for_macs(model, blocks_macs(model, 196)) == [0] * 12
    assert schedule_for_macs(model, 1)[:3] == schedule_for_macs(model, 1, 20)[:3] == [98, 49, 24]  # half in every block


@pytest.mark.parametrize("floor", [25, 80, 100])
def test_a_geometric_schedule_has_the_same_cost_and_merges_earlier(deep, floor):
    budget = blocks_macs(deep, 100)
    steady, shaped = schedule_for_macs(deep, budget), schedule_for_macs(deep, budget, floor)
    assert 0.9 * budget < blocks_macs(deep, 196, shaped) <= budget
    assert shaped[0] > steady[0]
    assert 196 - sum(shaped) >= min(floor, 70)  # the cost of 100 tokens allows no higher floor
