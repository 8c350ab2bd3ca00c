"""Loading base + delta by name, file and weights."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import spot
from spot.errors import InputError
from spot.models import loading, shipped
from spot.models.deltas import save_delta
from tests.conftest import VIT_TINY


@pytest.fixture
def retrofit(shared_data, vit_tiny, tmp_path, monkeypatch):
    """A delta on the real ViT-Ti, standing where the built-in ones do."""
    base = load_file(shared_data / "weights" / f"{VIT_TINY}.safetensors")
    trained = spot.adapt(spot.load(VIT_TINY, weights=shared_data / "weights" / f"{VIT_TINY}.safetensors").vit)
    with torch.no_grad():
        trained.vit.blocks[0].mlp.fc1.weight += 0.01 * torch.randn_like(trained.vit.blocks[0].mlp.fc1.weight)
    path = tmp_path / f"{VIT_TINY}+spot.safetensors"
    save_delta(trained, base, path, base=VIT_TINY, method="float16", config={"tokens": 49, "prior": "center"})
    for module in (loading, shipped):
        monkeypatch.setattr(module, "built_in", lambda: {path.stem: path})
    return trained, path


@torch.no_grad()
def test_a_retrofit_is_its_base_and_what_training_added(retrofit, shared_data):
    trained, path = retrofit
    weights = shared_data / "weights" / f"{VIT_TINY}.safetensors"
    images, positions = torch.randn(2, 3, 224, 224), torch.rand(2, 9, 2)
    for name in (f"{VIT_TINY}+spot", path):
        model = spot.load(name, weights=weights)
        assert (model.tokens, model.prior) == (49, "center")
        torch.testing.assert_close(model(images, positions), trained(images, positions), atol=1e-2, rtol=1e-2)
    base = spot.load(VIT_TINY, weights=weights)
    assert (base(images, positions) - trained(images, positions)).abs().max() > 0.05


def test_another_base_is_refused(retrofit, shared_data, tmp_path):
    state = load_file(shared_data / "weights" / f"{VIT_TINY}.safetensors")
    state["head.bias"] = state["head.bias"] + 1e-3
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="delta on vit_tiny"):
        spot.load(f"{VIT_TINY}+spot", weights=tmp_path / "other.safetensors")


def test_a_retrofit_that_does_not_exist_is_named():
    with pytest.raises(InputError, match="no model"):
        spot.load("vit_giant_patch14_dinov2+spot")
