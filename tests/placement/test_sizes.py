"""Sizes of windows: the rule for "auto", and scales as a search moves them."""

import math

import pytest
import torch

from spot.errors import InputError
from spot.placement.files import Placements
from spot.placement.oracle import search
from spot.placement.sizes import SCALE_STEP, auto_scale, check_scale, sized, tiling_scale, variable_limits
from tests.conftest import make_nano


def test_tiling_makes_windows_as_large_as_the_image_together():
    assert tiling_scale(49, 224, 224, 16) == 2  # 7 × 7 windows of 32 pixels
    assert tiling_scale(1, 224, 224, 16) == 14
    assert tiling_scale(8, 64, 128, 16) == 2  # 2 × 4 windows of 32 pixels
    assert tiling_scale(400, 224, 224, 16) == 1  # never smaller than a pixel


def test_auto_grows_as_tokens_get_fewer_and_is_one_on_the_grid():
    scales = [auto_scale(tokens, 224, 224, 16) for tokens in (1, 9, 25, 49, 100, 196, 400)]
    assert scales == sorted(scales, reverse=True)
    assert scales[-2:] == [1, 1]
    assert scales[3] == pytest.approx(2**0.7)  # 49 windows of scale 2 tile; 0.7 of the way there
    assert scales[0] == pytest.approx(14**0.5)  # half of the way at least
    assert all(each <= tiling_scale(n, 224, 224, 16) for n, each in zip((1, 9, 25, 49, 100), scales, strict=False))


def test_a_model_places_windows_of_its_scale_and_two_columns_mean_one():
    model, images = make_nano(), torch.randn(2, 3, 32, 32)
    assert model.place(images, tokens=5).shape == (2, 5, 2)
    assert model.place(images, tokens=5, scale=1).shape == (2, 5, 2)
    large = model.place(images, tokens=5, scale=1.5)
    assert torch.equal(large[..., :2], model.place(images, tokens=5)) and (large[..., 2] == 1.5).all()
    model.scale = "auto"
    assert model.place(images, tokens=16).shape == (2, 16, 2)
    torch.testing.assert_close(model.place(images, tokens=4)[..., 2], torch.full((2, 4), 2**0.7))
    assert torch.equal(model(images, tokens=4), model(images, model.place(images, tokens=4)))
    assert torch.equal(model(images, tokens=4, scale=1), model(images, model.place(images, tokens=4)[..., :2]))


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "large", True])
def test_what_is_no_scale_is_named(scale):
    model = make_nano()
    with pytest.raises(InputError, match="scale must be"):
        check_scale(scale)
    with pytest.raises(InputError, match="scale must be"):
        model.scale = scale
    with pytest.raises(InputError, match="scale must be"):
        model.place(torch.zeros(1, 3, 32, 32), scale=scale)


def test_a_search_moves_windows_to_the_size_that_lowers_the_objective():
    images = torch.zeros(3, 3, 32, 32)

    def model(images, positions):  # best where the scale is 2, wherever windows stand
        distance = (positions[..., 2].log() - math.log(2)).square().sum(1)
        return torch.stack([-distance, distance + 0 * positions.sum((1, 2))], 1)

    start = sized(torch.full((3, 4, 2), 0.5), 1.2)
    result = search(model, images, torch.zeros(3, dtype=torch.int64), start, steps=40, lr=3e-3)
    assert result.trajectory.shape == (3, 41, 4, 3)
    torch.testing.assert_close(result.best[..., 2], torch.full((3, 4), 2.0), atol=0.05, rtol=0)
    assert (result.trajectory[..., 2] > 1.19).all()


def test_a_search_on_a_model_keeps_windows_within_the_image():
    model, images = make_nano(), torch.randn(2, 3, 32, 32)
    result = search(model, images, torch.tensor([1, 2]), model.place(images, tokens=3, scale=3.9), steps=3, lr=0.05)
    assert result.trajectory[..., 2].max() <= 4 + 1e-5  # a window of the image's 32 pixels
    assert not torch.equal(result.positions[..., 2], result.trajectory[:, 0, :, 2])


@pytest.mark.parametrize("columns", [3, 7])
def test_placements_keep_scales_and_regions_in_a_file(tmp_path, columns):
    trajectory = torch.rand(2, 3, 5, columns) + 0.5
    Placements(["a", "b"], trajectory).save(tmp_path / "sized.safetensors")
    assert torch.equal(Placements.load(tmp_path / "sized.safetensors").trajectory, trajectory)
    with pytest.raises(InputError, match="scale and must be above 0"):
        Placements(["a", "b"], trajectory - 2)
    with pytest.raises(InputError, match="do not go into one file"):
        Placements.merge([Placements(["a"], trajectory[:1]), Placements(["b"], trajectory[1:, ..., :2])])


def test_a_search_may_halve_scales_below_a_half():
    low, _ = variable_limits(torch.zeros(2), torch.ones(2), torch.tensor([[[0.5, 0.5, 0.3]]]), 4.0)
    assert (low[2] * SCALE_STEP).exp() == pytest.approx(0.15)
