"""Schedules by hand; their cost is tested against torch's counter in test_tome.py."""

import pytest

from paper.backbone import vit_b16
from spot.evaluation.cost import macs
from spot.models.tome import ToMe
from spot.models.tome_schedule import as_given, evenly, geometric, in_few_blocks, late, to_reach
from tests.conftest import make_nano


def test_a_geometric_schedule_keeps_its_share_until_its_floor():
    assert geometric(0.75, 30, 100, 6) == [25, 19, 14, 10, 2, 0]  # 75, 56, 42, 32, 30, 30
    assert geometric(0.3, 1, 20, 3) == [10, 5, 2]  # never more than half
    assert geometric(1.0, 1, 20, 3) == [0, 0, 0]


def test_few_blocks_merge_the_same_number_a_quarter_to_two_thirds_of_the_way():
    assert in_few_blocks(0.7, 37, 12) == [0, 0, 0, 6, 6, 0, 6, 0, 6, 0, 0, 0]  # 25.9 of 37, in four blocks
    assert in_few_blocks(0.7, 100, 24) == [17 if block in (6, 8, 12, 16) else 0 for block in range(24)]
    assert in_few_blocks(1.0, 10, 2) == [5, 2]  # blocks 0 and 1, never more than half
    assert in_few_blocks(0.0, 10, 12) == [0] * 12


def test_a_late_schedule_merges_nothing_at_first_and_then_as_much_in_every_block():
    assert late(0.83, 1 / 4, 196, 12) == [0, 0, 0] + [18] * 9  # 162.7 of 196, in nine blocks
    assert late(1.0, 0.5, 10, 4) == [0, 0, 5, 2]  # never more than half
    assert late(0.0, 0.5, 10, 4) == [0, 0, 0, 0]


@pytest.mark.parametrize("floor", [0.25, 0.8, 1.0])
def test_schedules_of_one_cost_cost_the_same_whatever_their_shape(floor):
    model = make_nano(depth=12, img_size=112)  # a grid of 196
    even, shaped = ToMe.matching(model, 100), ToMe.matching(model, 100, floor=floor)
    budget = sum(ToMe(model, r=0).macs(100))
    assert sum(shaped.macs()) <= budget and sum(shaped.macs()) > 0.9 * budget
    assert shaped.schedule() != even.schedule() and shaped.schedule()[0] > even.schedule()[0]
    assert shaped.tokens >= shaped._floor and shaped._floor <= round(floor * 100)


def test_multiply_adds_of_vit_b16_are_the_published_ratios():
    """Bolya et al.'s r on ViT-B/16 at 224 with their code: 1.34, 1.70 and 2.02 times fewer multiply-adds."""
    model = vit_b16()
    ratios = [macs(model, tokens=196) / macs(ToMe(model, r=r)) for r in (8, 13, 16)]
    assert ratios == pytest.approx([1.34, 1.70, 2.02], abs=0.02)


def test_the_paper_s_r_16_on_196_tokens_merges_half_of_the_last_20():
    assert as_given(16, 196, 12) == [16] * 11 + [10]


def test_merges_are_spread_evenly_and_at_most_half():
    assert evenly(8, 100, 3) == [3, 3, 2]
    assert evenly(60, 20, 3) == [10, 5, 2]


def test_every_token_count_can_be_reached_exactly():
    for target in range(1, 197):
        schedule, left = to_reach(target, 196, 12), 196
        for r in schedule:
            assert 0 <= r <= left // 2
            left -= r
        assert left == target
