"""Features at points, and maps of scattered tokens."""

import pytest
import torch

from spot.errors import InputError
from spot.models.dense import to_map
from tests.conftest import make_nano
from tests.export.test_graph import random_model


def images(batch=2, size=(32, 32)):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_mixed_224", "eva02_tiny_patch14_224"])
@torch.no_grad()
def test_at_the_grid_s_points_features_are_the_vit_s_own(name):
    model = random_model(name)
    grid = model.grid(images())
    features = model.features_at(images(), grid[:, [5, 2, 9]])
    expected = model.vit.forward_features(images())[:, model.num_prefix_tokens :][:, [5, 2, 9]]
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_point_s_feature_depends_on_no_other_point_and_changes_smoothly():
    model = make_nano()
    points = torch.tensor([[0.31, 0.62], [0.9, 0.1], [0.5, 0.5]]).expand(2, -1, -1)
    together = model.features_at(images(), points)
    alone = model.features_at(images(), points[:, 1:2])
    torch.testing.assert_close(together[:, 1:2], alone, atol=1e-5, rtol=1e-4)
    little, less = ((model.features_at(images(), points + step) - together).norm() for step in (1e-3, 1e-4))
    assert little / less == pytest.approx(10, rel=0.1)


def test_the_image_s_tokens_may_be_placed_anywhere():
    model = make_nano()
    positions = model.place(images(), tokens=5, prior="isotropic")
    expected = model.forward_features(images(), positions)[:, model.num_prefix_tokens :]
    torch.testing.assert_close(model.features_at(images(), positions, positions), expected, atol=1e-5, rtol=1e-4)


def test_points_of_another_shape_are_refused():
    with pytest.raises(InputError, match="points must have shape"):
        make_nano().features_at(images(), torch.rand(5, 2))


@torch.no_grad()
def test_on_the_grid_the_map_is_the_grid_s_map():
    model = make_nano()
    (features,) = model.token_features(images(), model.grid(images()), indices=1)
    assert torch.equal(model.to_map(features), features.tokens.transpose(1, 2).unflatten(2, (4, 4)))


def test_between_tokens_the_map_is_their_mean_with_the_stated_weights():
    positions = torch.tensor([[[0.5, 0.25], [0.5, 0.75]]])
    tokens = torch.tensor([[[0.0], [1.0]]])
    values = to_map(tokens, positions, (1, 4))[0, 0, 0]  # cells at 1/8, 3/8, 5/8, 7/8: 0.5 and 1.5, or 2.5 cells away
    near, far = 1 / 0.5**2, 1 / 1.5**2
    torch.testing.assert_close(values[1], torch.tensor(far / (near + far)))
    torch.testing.assert_close(values.flip(0), 1 - values)


def test_a_token_that_is_left_out_has_no_weight_when_it_is_exchanged():
    """The map is continuous: the fifth nearest token may change places with the fourth unnoticed."""
    generator = torch.Generator().manual_seed(0)
    positions, tokens = torch.rand(1, 9, 2, generator=generator), torch.rand(1, 9, 3, generator=generator)
    way = torch.linspace(0, 0.2, 400)
    maps = torch.cat([to_map(tokens, positions + step * torch.tensor([0.0, 1.0]), (5, 5)) for step in way])
    assert (maps[1:] - maps[:-1]).abs().max() < 0.05


def test_a_constant_stays_constant_for_any_number_of_tokens():
    for count in (1, 2, 4, 5, 30):
        positions = torch.rand(2, count, 2, generator=torch.Generator().manual_seed(count))
        torch.testing.assert_close(to_map(torch.ones(2, count, 3), positions, (6, 7)), torch.ones(2, 3, 6, 7))
