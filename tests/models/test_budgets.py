"""Weights that follow the budget."""

import copy

import pytest
import timm
import torch
from safetensors.torch import save_file

import spot
from spot.errors import InputError
from spot.evaluation.accuracy import Setting
from spot.hashes import hash_model
from spot.models.budgets import share_of_change
from spot.models.deltas import save_delta

NAME = "vit_tiny_patch16_224"


def test_the_share_is_all_with_few_tokens_none_on_the_grid_and_linear_in_the_logarithm_between():
    assert [share_of_change(tokens, 196, 25) for tokens in (1, 25, 196, 400)] == [1, 1, 0, 0]
    assert share_of_change(70, 196, 25) == 0.5  # 196 / 70 = 2.8, the square root of 196 / 25
    assert share_of_change(195, 196, 25) == 1 / 16  # never none off the grid
    shares = [share_of_change(tokens, 196, 25) for tokens in range(1, 197)]
    assert shares == sorted(shares, reverse=True)
    assert [share_of_change(tokens, 16, 25) for tokens in (4, 16)] == [1, 0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base, and a retrofit of it that was trained by adding noise, as a delta that follows the budget."""
    folder = tmp_path_factory.mktemp("delta")
    torch.manual_seed(0)
    base = timm.create_model(NAME).eval()
    with torch.no_grad():
        base.head.weight.normal_(std=0.1)
    save_file(base.state_dict(), folder / "base.safetensors")
    plain = spot.load(NAME, weights=folder / "base.safetensors")
    taught = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in taught.vit.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    save_delta(taught, plain.vit.state_dict(), folder / "delta.safetensors", base=NAME, config={"fewest": 25})
    return plain, spot.load(folder / "delta.safetensors", weights=folder / "base.safetensors")


def test_on_the_grid_it_is_the_base_with_few_tokens_the_retrofit_and_between_a_mixture(made):
    plain, model = made
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model(images, model.grid(images)), plain.vit(images), atol=1e-4, rtol=1e-4)
        full = copy.deepcopy(model)
        full.fewest = None
        assert torch.equal(model(images, tokens=9), full(images, tokens=9))
        half = copy.deepcopy(plain)
        for mixed, theirs, ours in zip(half.parameters(), plain.parameters(), full.parameters(), strict=True):
            mixed.copy_((theirs + ours) / 2)
        torch.testing.assert_close(model(images, tokens=70), half(images, tokens=70), atol=1e-4, rtol=1e-4)
        assert (model(images, tokens=70) - full(images, tokens=70)).abs().max() > 1e-2
        pooled = model.forward_head(model.forward_features(images, tokens=70), pre_logits=True)
        other = half.forward_head(half.forward_features(images, tokens=70), pre_logits=True)
        torch.testing.assert_close(pooled, other, atol=5e-2, rtol=0.1)  # but for the last norm and pool, which are ours
        tokens, expected = (each.forward_intermediates(images, tokens=70)[3].tokens for each in (model, half))
        torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-4)


def test_gradients_reach_positions_and_the_model_itself_is_left_alone(made):
    _, model = made
    before = hash_model(model)
    images = torch.randn(1, 3, 224, 224)
    positions = model.place(images, tokens=49).requires_grad_()
    model(images, positions).sum().backward()
    assert positions.grad.abs().sum() > 0
    assert hash_model(model) == before
    assert all(parameter.grad is None for parameter in model.suited(49).parameters())


def test_baselines_have_the_weights_of_their_budget(made):
    plain, model = made
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        dense = Setting("plain").of(model).model(images)
        torch.testing.assert_close(dense, plain.vit(images), atol=1e-4, rtol=1e-4)
        dropped = Setting("patch-dropout", 70).of(model).model
    assert dropped.spot_vit is model.suited(70)


def test_one_set_of_weights_can_be_saved_and_traced_and_all_of_them_cannot(made, tmp_path):
    plain, model = made
    images = torch.randn(1, 3, 224, 224)
    with pytest.raises(InputError, match=r"follow the budget; save those for one, as model.suited"):
        model.save_pretrained(tmp_path / "all")
    with pytest.raises(InputError, match=r"compile or export model.suited"):
        torch.jit.trace(model, (images, model.place(images, tokens=49)))
    one = model.suited(49)
    one.save_pretrained(tmp_path / "one")
    again = spot.load(tmp_path / "one")
    with torch.no_grad():
        torch.testing.assert_close(again(images, tokens=49), model(images, tokens=49))
        assert (again(images, tokens=196) - plain.vit(images)).abs().max() > 1e-2  # it follows no budget any more


def test_other_options_keep_it(made):
    _, model = made
    from spot.models.checkpoints import refitted

    features = refitted(model, {"num_classes": 0})
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = model.suited(49).forward_head(model.forward_features(images, tokens=49), pre_logits=True)
        torch.testing.assert_close(features(images, tokens=49), expected, atol=1e-4, rtol=1e-4)
