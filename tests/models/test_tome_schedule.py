"""Schedules by hand; their cost is tested against torch's counter in test_tome.py."""

from spot.models.tome_schedule import as_given, evenly, to_reach


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
