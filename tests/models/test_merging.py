"""More tokens for the same cost: placed, and merged in later blocks."""

import pytest
import torch

import spot
from spot.data.images import data_for
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.accuracy import Setting
from spot.evaluation.cost import macs
from spot.models.tome import Merging, ToMe
from spot.models.tome_schedule import blocks_macs
from tests.conftest import make_nano


@pytest.fixture(scope="module")
def vit():
    return make_nano(depth=12, img_size=112)  # a grid of 196


@pytest.mark.parametrize("tokens", [16, 25, 49, 100, 150, 195])
def test_it_costs_no_more_than_its_budget_and_one_token_more_would(vit, tokens):
    merging = Merging(vit, tokens)
    given = macs(vit.at(tokens=tokens))
    count, most = merging.starting_tokens, int(0.7 * merging.starting_tokens)
    assert tokens < count <= 196 and 0 < sum(merging.schedule()) <= most
    assert macs(merging) <= given and merging.tokens == tokens
    blocks = [block for block, r in enumerate(merging.schedule()) if r]
    assert blocks == [3, 4, 6, 8] and len(set(merging.schedule())) == 2  # late and even
    if count < 196:
        r = int(0.7 * (count + 1) / 4)
        saved = blocks_macs(vit, count + 1) - blocks_macs(
            vit, count + 1, [r * (block in blocks) for block in range(12)]
        )
        assert macs(vit.at(tokens=count + 1)) - saved > given


def test_with_all_of_the_grid_nothing_is_merged(vit):
    images = torch.rand(2, 3, 112, 112)
    merging = Merging(vit, 196)
    assert (merging.starting_tokens, merging.schedule()) == (196, [0] * 12)
    torch.testing.assert_close(merging(images), vit(images, vit.grid(images)), rtol=1e-4, atol=1e-4)


def test_it_is_tome_on_tokens_that_are_placed():
    model = spot.load("scenes-a")
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    merging = Merging(model, 16, "center")
    count, schedule = merging.starting_tokens, merging.schedule()
    places = model.place(images, tokens=count, prior="center")
    assert count > 16 and sum(schedule) > 0
    torch.testing.assert_close(merging.place(images), places)
    torch.testing.assert_close(merging(images), ToMe(model, schedule)(images, places))
    assert (model.tokens, model.prior) == (64, "isotropic")  # left as they were


def test_it_goes_by_its_name():
    model = spot.load("scenes-a")
    scenes = loader(data_for(model, "scenes", limit=32), 32)
    row = spot.evaluate(model, scenes, [Setting("merged", 16)]).rows()[0]
    assert (row["placement"], row["tokens"]) == ("merged", 16)
    with pytest.raises(InputError, match="no learned prior"):
        spot.BASELINES["merged-learned"].build(model, 16)(torch.rand(1, 3, 64, 64))


def test_another_budget_is_another_model(vit):
    with pytest.raises(InputError, match="is for 25 tokens, got 36; make another"):
        Merging(vit, 25)(torch.rand(1, 3, 112, 112), tokens=36)
    with pytest.raises(InputError, match="at least 1"):
        Merging(vit, 0)
