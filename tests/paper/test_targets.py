"""Targets of a policy that were tried beside class attention."""

import itertools

import pytest
import torch

import spot
from paper.targets import occlusion, oracle
from spot.data.images import data_for
from spot.data.loader import loader
from spot.placement.oracle import PRESETS, search
from spot.training.learn import TARGETS
from tests.training.test_learn import HOW


@pytest.fixture(scope="module")
def model():
    return spot.load("scenes-a")


@pytest.fixture(scope="module")
def images(model):
    return next(iter(loader(data_for(model, "scenes", limit=8), 8))).images


def test_occlusion_is_the_change_of_the_answer_without_a_part_of_the_grid(model, images):
    maps = occlusion(model, model, images[:2], HOW)
    assert maps.shape == (2, 7, 7)
    grid = model.grid(images[:2])
    away = ~((grid[0, :, 0] < 1 / 7) & (grid[0, :, 1] >= 6 / 7))  # the upper right part
    with torch.no_grad():
        full, less = model(images[:2], grid).log_softmax(1), model(images[:2], grid[:, away]).log_softmax(1)
    change = (full.exp() * (full - less)).sum(1) + 1e-4
    ratio = maps[:, 0, 6] / change
    torch.testing.assert_close((maps / ratio[:, None, None])[:, 0, 6], change)
    with torch.no_grad():
        other = model(images[:2], grid[:, ~((grid[0, :, 0] < 1 / 7) & (grid[0, :, 1] < 1 / 7))]).log_softmax(1)
    torch.testing.assert_close(maps[:, 0, 0] / ratio, (full.exp() * (full - other)).sum(1) + 1e-4, rtol=1e-3, atol=1e-6)


def test_the_oracle_s_map_is_high_where_a_search_has_put_tokens(model, images):
    dense = model(images[:2], model.grid(images[:2]))
    start = model.place(images[:2], tokens=HOW.tokens, prior="isotropic")
    placed = search(model, images[:2], None, start, PRESETS["agree"], dense=dense).positions
    expected = torch.zeros(2, 28, 28)
    for image, row, column in itertools.product(range(2), range(28), range(28)):
        at = torch.tensor([row + 0.5, column + 0.5]) / 28
        squares = (placed[image] - at).square().sum(-1) * HOW.tokens
        expected[image, row, column] = torch.exp(-2 * squares).sum()
    expected /= expected.sum((1, 2), keepdim=True)
    torch.testing.assert_close(oracle(model, model, images[:2], HOW), expected, atol=1e-6, rtol=1e-4)
    assert (placed - start).abs().max() > 0.02


@pytest.mark.parametrize("target", TARGETS)
def test_targets_are_densities(model, images, target):
    maps = TARGETS[target](model, model, images, HOW)
    assert (maps >= 0).all()
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(8), rtol=1e-4, atol=1e-4)
