"""Cached placements: the same predictions, gradients and counts as without a cache."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spot.errors import InputError
from tests.conftest import make_nano


@pytest.mark.parametrize("prior", ["isotropic", "center"])
@pytest.mark.parametrize("scale", [None, 0.7, 2.0, "auto"])
def test_a_placement_that_is_kept_predicts_as_the_same_positions_given(prior, scale):
    """Also where it was first used in inference mode under autocast, which must leave no mark on what is kept."""
    images = torch.randn(3, 3, 64, 64)
    model = make_nano().at(prior=prior, tokens=13, scale=scale)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        model(images)
    for shape in (images.shape[-2:], (39, 57)):
        pixels = images[..., : shape[0], : shape[1]].clone()
        assert torch.equal(model(pixels), model(pixels, model.place(pixels)))
        model.place(pixels).fill_(0.5)  # the caller's own copy
        assert torch.equal(model(pixels), model(pixels, model.place(pixels)))


def test_a_placement_that_is_kept_holds_no_weights():
    images = torch.randn(3, 3, 64, 64)
    model = make_nano().at(tokens=13, scale=1.5)
    model(images)
    with torch.no_grad():
        for weight in (model.vit.pos_embed, model.vit.patch_embed.proj.weight):
            weight.mul_(1.5)
    assert torch.equal(model(images), model(images, model.place(images)))
    model(images).sum().backward()
    assert model.vit.pos_embed.grad[:, 1:].any() and model.vit.patch_embed.proj.weight.grad.any()


def test_operators_that_are_counted_are_those_of_the_whole_forward_pass():
    model, images = make_nano().at(tokens=13), torch.randn(3, 3, 64, 64)
    flops = []
    for positions in (None, model.place(images), None):
        with FlopCounterMode(display=False) as counter:
            model(images, positions)
        flops.append(counter.get_total_flops())
        model(images)
    assert len(set(flops)) == 1


def test_what_callers_get_is_their_own_to_write_in():
    model, images = make_nano().at(tokens=5), torch.randn(1, 3, 32, 32)
    (features,) = model.token_features(images, indices=1)
    features.positions.fill_(0.5)
    assert torch.equal(model(images), model(images, model.place(images)))


def test_windows_larger_than_the_image_are_refused_as_without_a_cache():
    with pytest.raises(InputError, match="use a scale of at most 4"):
        make_nano()(torch.randn(1, 3, 32, 32), tokens=5, scale=5.0)
