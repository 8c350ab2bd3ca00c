"""Intervals and tests against hand-worked cases, exact arithmetic and scipy."""

import pytest
import torch

from paper.statistics import accuracy_row, difference, mean
from spot.errors import InputError


def test_a_share_is_in_percent_with_its_interval():
    found = accuracy_row(torch.tensor([True] * 30 + [False] * 70))
    assert found["top1"] == pytest.approx(30)
    assert (found["low"], found["high"]) == pytest.approx((21.9, 39.6), abs=0.06)  # Wilson's, from a table
    assert found["std"] is None and found["images"] == 100


def test_seeds_give_a_standard_deviation_but_no_more_images():
    found = accuracy_row(torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]).bool())
    assert found["top1"] == pytest.approx(50)
    assert found["std"] == pytest.approx(25)  # of 50, 25 and 75
    assert found["images"] == 4


def test_a_paired_difference_counts_only_images_that_changed():
    before = torch.tensor([True] * 50 + [False] * 50)
    after = before.clone()
    after[45:65] = True  # fifteen more right, none lost
    found = difference(before, after)
    assert found["delta"] == pytest.approx(15)
    assert found["p"] == pytest.approx(2 * 0.5**15)
    assert 0 < found["delta_low"] < 15 < found["delta_high"] < 30


def test_the_interval_of_a_difference_holds_the_truth_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(400):
        first = torch.rand(80, generator=generator) < 0.5
        second = torch.where(
            torch.rand(80, generator=generator) < 0.3, torch.rand(80, generator=generator) < 0.9, first
        )
        found = difference(first, second)  # the truth is 0.3 × (0.9 − 0.5) = 12 points
        inside += found["delta_low"] <= 12 <= found["delta_high"]
    assert 0.92 < inside / 400 < 0.985


def test_a_difference_turned_round_is_its_negative():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(2, 60, generator=generator) < 0.6
    here, there = difference(first, second), difference(second, first)
    assert here["delta"] == pytest.approx(-there["delta"])
    assert here["delta_low"] == pytest.approx(-there["delta_high"])
    assert here["p"] == there["p"]


def test_seeds_are_averaged_before_images_are_compared():
    one = torch.zeros(40, dtype=torch.bool)
    seeds = torch.stack([torch.arange(40) < 20, torch.arange(40) < 10])
    assert difference(one, seeds)["delta"] == pytest.approx(37.5)


def test_the_mean_leaves_out_what_is_not_a_number_and_says_so():
    values = torch.cat([torch.linspace(-1, 3, 99), torch.full((5,), torch.nan)])
    found = mean(values)
    assert found["mean"] == pytest.approx(1, abs=1e-6)
    assert found["images"] == 99 and found["left_out"] == 5
    half = 1.96 * values[:99].std().item() / 99**0.5
    assert found["high"] - found["low"] == pytest.approx(2 * half, rel=0.1)


@pytest.mark.parametrize("test", [lambda right: difference(right, right), lambda right: mean(right.float())])
def test_too_few_images_for_a_test_are_refused(test):
    with pytest.raises(InputError, match="at least 20 images, got 19"):
        test(torch.ones(19, dtype=torch.bool))


def test_different_images_are_not_compared():
    with pytest.raises(InputError, match="same images"):
        difference(torch.ones(30), torch.ones(31))
