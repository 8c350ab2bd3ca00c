"""Weights by budget: a family makes an ordinary model for each, from a base and a delta."""

import copy

import pytest
import timm
import torch
from safetensors.torch import save_file

import spot
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, with_models
from spot.hashes import hash_tensors
from spot.models.family import apply_delta, at_budget, dense_model, read_delta, save_delta, share_of_change
from spot.models.loading import load_source
from spot.placement.policy import Policy

NAME = "vit_tiny_patch16_224"


def test_the_share_is_all_with_few_tokens_none_on_the_grid_and_linear_in_the_logarithm_between():
    assert [share_of_change(tokens, 196, 25) for tokens in (1, 25, 196, 400)] == [1, 1, 0, 0]
    assert share_of_change(70, 196, 25) == 0.5  # 196 / 70 = 2.8, the square root of 196 / 25
    assert share_of_change(195, 196, 25) == 1 / 16  # never none off the grid
    shares = [share_of_change(tokens, 196, 25) for tokens in range(1, 197)]
    assert shares == sorted(shares, reverse=True)
    assert [share_of_change(tokens, 16, 25) for tokens in (4, 16)] == [1, 0]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A base, and a retrofit of it that was trained by adding noise, as a delta."""
    folder = tmp_path_factory.mktemp("delta")
    torch.manual_seed(0)
    base = timm.create_model(NAME).eval()
    with torch.no_grad():
        base.head.weight.normal_(std=0.1)
    save_file(base.state_dict(), folder / "base.safetensors")
    plain = spot.load(NAME, weights=folder / "base.safetensors")
    taught = copy.deepcopy(plain)
    with torch.no_grad():
        for name, parameter in taught.vit.named_parameters():
            if name != "norm.bias":
                parameter.add_(0.02 * torch.randn_like(parameter))
    taught.policy = Policy(16, about={"model": NAME, "hash": "x"})
    how = {"base": NAME, "config": {"min_tokens": 25, "scale": "auto"}}
    save_delta(taught, plain.vit.state_dict(), folder / "delta.safetensors", **how)
    return folder / "base.safetensors", folder / "delta.safetensors", plain, taught


@pytest.fixture(scope="module")
def family(files):
    return spot.Family(files[1], weights=files[0])


@pytest.mark.parametrize(("tokens", "share"), [(9, 1.0), (25, 1.0), (70, 0.5), (196, 0.0)])
def test_weights_are_a_mixture_and_on_the_grid_timms_to_the_last_bit(family, files, tokens, share):
    _, _, plain, taught = files
    ours = family.model(tokens=tokens).vit.state_dict()
    for name, base in plain.vit.state_dict().items():
        expected = base + share * (taught.vit.state_dict()[name] - base)
        torch.testing.assert_close(ours[name], expected, atol=5e-4 * share, rtol=1e-3 * share)


def test_each_model_has_weights_of_its_own_and_the_family_keeps_none(family):
    first, second = family.model(tokens=49), family.model(tokens=49)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    images = torch.randn(1, 3, 224, 224)
    assert (first(images) - second(images)).abs().max() > 0
    torch.testing.assert_close(family.model(tokens=49)(images), second(images))
    storages = [{each.untyped_storage().data_ptr() for each in model.parameters()} for model in (first, second)]
    assert not storages[0] & storages[1]


def test_a_model_made_in_inference_mode_can_still_learn(family):
    with torch.inference_mode():
        model = family.model(tokens=9)
    model(torch.randn(1, 3, 224, 224)).sum().backward()
    assert model.vit.head.weight.grad is not None


def test_loading_a_name_takes_the_weights_of_its_budget(family, files):
    weights, delta, *_ = files
    images = torch.randn(1, 3, 224, 224)
    loaded = spot.load(delta, weights=weights, tokens=25)
    assert (loaded.tokens, loaded.scale, loaded.prior) == (25, "auto", "isotropic")
    torch.testing.assert_close(loaded(images), family.model(tokens=25)(images))
    assert spot.load(delta, weights=weights).tokens == 49
    # another budget for one call changes the placement, not the weights
    again = loaded(images, tokens=100)
    torch.testing.assert_close(again, family.model(tokens=25).at(tokens=100)(images))
    assert (again - family.model(tokens=100)(images)).abs().max() > 1e-3


def test_other_options_are_fitted_as_timm_does(files):
    weights, delta, *_ = files
    model = spot.load(delta, weights=weights, tokens=25, num_classes=2)
    assert model(torch.randn(1, 3, 224, 224)).shape == (1, 2) and model.policy is not None
    expected = spot.load(delta, weights=weights, tokens=25).vit.blocks[3].mlp.fc1.weight
    torch.testing.assert_close(model.vit.blocks[3].mlp.fc1.weight, expected)


def test_larger_images_count_their_own_cells(family):
    assert family.share(49) == share_of_change(49, 196, 25)
    assert family.share(49, (448, 224)) == share_of_change(49, 392, 25)
    wide = family.model(tokens=49, image_size=(448, 224)).vit.head.weight
    assert (wide - family.model(tokens=49).vit.head.weight).abs().max() > 0


def test_settings_of_one_budget_share_a_model_and_baselines_have_the_weights_of_theirs(family, files):
    one, two, other = with_models(family, [Setting("isotropic", 49), Setting("center", 49), Setting("center", 25)])
    assert one.model.vit is two.model.vit is not other.model.vit
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        plain, dropped = with_models(family, ["plain", Setting("patch-dropout", 70)])
        torch.testing.assert_close(plain.model(images), files[2].vit(images))
    torch.testing.assert_close(dropped.model.spot_vit.vit.head.weight, family.model(tokens=70).vit.head.weight)


def test_a_family_and_a_model_are_asked_alike(family):
    model = family.model(tokens=49)
    assert at_budget(model, 25).vit is model.vit
    assert at_budget(family, 25).tokens == 25
    assert dense_model(family).tokens == dense_model(model).tokens == 196


def test_a_delta_without_a_smallest_budget_is_one_set_of_weights(files, tmp_path):
    weights, _, plain, taught = files

    def family(config):
        save_delta(taught, plain.vit.state_dict(), tmp_path / "d.safetensors", base=NAME, config=config)
        return spot.Family(tmp_path / "d.safetensors", weights=weights)

    constant = family({"prior": "center"})
    assert constant.model().prior == "center"
    torch.testing.assert_close(constant.model(196).vit.head.weight, taught.vit.head.weight, atol=5e-4, rtol=1e-3)
    assert family({"fewest": 16, "scale": "auto"}).min_tokens == 16  # as version 0.2 wrote it


def test_bad_input_is_one_sentence(family, files, tmp_path):
    with pytest.raises(InputError, match="scenes-a has no family of weights by budget"):
        spot.Family("scenes-a")
    with pytest.raises(InputError, match=r"use spot\.load for other models"):
        spot.Family("no-such-model")
    for tokens in (0, 2.5, True):
        with pytest.raises(InputError, match="tokens must be a whole number"):
            family.model(tokens=tokens)
    with pytest.raises(InputError, match="model must be SpotViT or Family"):
        at_budget("vit-ti", 25)
    assert isinstance(load_source(files[1], weights=files[0]), spot.Family)
    assert isinstance(load_source("scenes-a"), spot.SpotViT)


# Deltas on disk


def test_a_delta_names_its_base_and_leaves_out_what_did_not_change(files):
    _, path, plain, taught = files
    stored, about = read_delta(path)
    config = {"min_tokens": 25, "scale": "auto", "policy": taught.policy.describe()}
    base = hash_tensors(plain.vit.state_dict())
    assert about == {"format": 1, "base": NAME, "hash": base, "config": config}
    changed = {name for name in stored if "|" not in name and not name.startswith("policy.")}
    assert {*plain.vit.state_dict()} - changed == {"norm.bias"}


def test_a_delta_fits_its_own_base_only(files, nano, tmp_path):
    base = files[2].vit.state_dict()
    with pytest.raises(InputError, match=rf"delta on {NAME} .*these weights are others"):
        apply_delta({**base, "head.bias": base["head.bias"] + 1e-6}, files[1])
    with pytest.raises(InputError, match=r"another architecture: blocks\.0"):
        save_delta(nano, base, tmp_path / "e.safetensors", base=NAME)
    assert not (tmp_path / "e.safetensors").exists()


@pytest.mark.parametrize(
    "header", ['{"format": 1}', '{"format": 1, "base": 3, "hash": "x", "config": {}}', '{"format": 2}', "[]"]
)
def test_a_damaged_header_is_named(header, tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "d.safetensors", metadata={"spot_delta": header})
    with pytest.raises(InputError, match=r"d\.safetensors is .*(damaged|format 2)"):
        read_delta(tmp_path / "d.safetensors")
