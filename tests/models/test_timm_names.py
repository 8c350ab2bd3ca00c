"""timm.create_model knows the shipped retrofits, and timm's own functions work with what it returns.

timm's tests/test_models.py was run against these names too; docs/training.md says which of them do not apply.
"""

import subprocess
import sys

import pytest
import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.models import get_pretrained_cfg_value
from timm.optim import create_optimizer_v2, param_groups_layer_decay

import spot
import spot.timm
from spot.errors import InputError
from tests.conftest import DEIT_TINY, VIT_TINY

VIT, DEIT = "spot_vit_tiny_patch16_224", "spot_deit_tiny_patch16_224"
BASES = {VIT: VIT_TINY, DEIT: DEIT_TINY}


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def file_of(shared_data, name):
    return str(shared_data / "weights" / f"{BASES[name]}.safetensors")


def test_timm_lists_them_with_their_bases_tag_and_data():
    assert timm.list_models("spot_*") == sorted(BASES)
    assert timm.list_pretrained("spot_*") == sorted(f"{name}.{base.split('.')[1]}" for name, base in BASES.items())
    for name, base in BASES.items():
        for key in ("mean", "std", "input_size", "crop_pct", "num_classes", "hf_hub_id"):
            assert get_pretrained_cfg_value(name, key) == get_pretrained_cfg_value(base, key)


@pytest.mark.parametrize("name", BASES)
def test_without_weights_it_trains_as_timms_models_do(name, images):
    model = timm.create_model(name, num_classes=10, tokens=25, drop_path_rate=0.1, prior="sobol")
    assert isinstance(model, spot.SpotViT) and model.training
    assert (model.tokens, model.prior, model.num_classes) == (25, "sobol", 10)
    output = model(images)
    assert output.shape == (2, 10)
    output.mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    assert len({group["lr_scale"] for group in groups}) == 12 + 2  # the blocks, the stem, the head
    create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05).step()


@pytest.mark.parametrize("name", BASES)
def test_a_file_of_the_bases_weights_gives_the_retrofit(name, images, shared_data):
    overlay = {"file": file_of(shared_data, name)}
    model = timm.create_model(name, pretrained=True, tokens=49, pretrained_cfg_overlay=overlay).eval()
    ours = spot.load(spot.timm.NAMES[name], tokens=49, weights=overlay["file"])
    with torch.no_grad():
        assert torch.equal(model(images), ours(images))
    new = timm.create_model(name, pretrained=True, num_classes=10, in_chans=1, weights=overlay["file"]).eval()
    assert new(images[:, :1]).shape == (2, 10) and new.tokens == 49
    assert torch.equal(new.vit.blocks[3].mlp.fc1.weight, ours.vit.blocks[3].mlp.fc1.weight)


def test_the_hubs_cache_gives_the_same_as_a_file(images, shared_data, tmp_path, monkeypatch):
    """As a download leaves it, in a folder of the caller's."""
    repository = tmp_path / f"models--timm--{VIT_TINY}"
    (repository / "snapshots" / "1").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1")
    (repository / "snapshots" / "1" / "model.safetensors").symlink_to(file_of(shared_data, VIT))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = timm.create_model(VIT, pretrained=True, tokens=25, cache_dir=tmp_path).eval()
    ours = spot.load("vit-ti", tokens=25, weights=file_of(shared_data, VIT))
    with torch.no_grad():
        assert torch.equal(model(images), ours(images))
    assert "cache_dir" not in model.options


def test_a_checkpoint_of_its_own_is_loaded(images, tmp_path):
    trained = timm.create_model(VIT, num_classes=3).eval()
    torch.save({"state_dict": trained.state_dict()}, tmp_path / "last.pth.tar")
    model = timm.create_model(VIT, num_classes=3, checkpoint_path=str(tmp_path / "last.pth.tar")).eval()
    with torch.no_grad():
        assert torch.equal(model(images), trained(images))


def test_a_whole_configuration_as_timms_scripts_resolve_it(shared_data):
    resolved = timm.models.resolve_model_input_args(VIT, {"img_size": 160}, tokens=36)
    assert timm.create_model(**resolved).img_size == (160, 160)
    forced = {"file": file_of(shared_data, VIT), "num_classes": -1}  # train.py --pretrained-path: a new head
    torch.manual_seed(0)
    first, second = (timm.create_model(VIT, pretrained=True, pretrained_cfg_overlay=forced) for _ in range(2))
    assert first.num_classes == 1000
    assert not torch.equal(first.get_classifier().weight, second.get_classifier().weight)


def test_the_configuration_names_parameters_that_are_there():
    model = timm.create_model(DEIT)
    for key in ("classifier", "first_conv"):
        assert f"{model.default_cfg[key]}.weight" in model.state_dict()
    assert resolve_data_config(model=model)["mean"] == (0.485, 0.456, 0.406)
    assert resolve_data_config(model=timm.create_model(VIT, pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3)}))[
        "mean"
    ] == (0.1, 0.2, 0.3)
    assert create_transform(**resolve_data_config(model=model)) is not None


def test_features_only_gives_maps_of_the_last_blocks(images):
    features = timm.create_model(VIT, features_only=True, out_indices=[-3, 8], tokens=49).eval()
    with torch.no_grad():
        maps = features(images)
    assert [each.shape for each in maps] == [(2, 192, 14, 14)] * 2 and len(features.model.vit.blocks) == 10
    assert features.feature_info.channels() == [192, 192] and features.feature_info.reduction() == [16, 16]
    assert "classifier" not in features.default_cfg and features.default_cfg["input_size"] == (3, 224, 224)
    with pytest.raises(InputError, match="feature_cls"):
        timm.create_model(VIT, features_only=True, feature_cls="fx")


def test_weights_of_others_are_refused_in_a_sentence(monkeypatch):
    with pytest.raises(InputError, match=r"not others by url; give weights=FILE"):
        timm.create_model(VIT, pretrained=True, pretrained_cfg_overlay={"url": "http://example.org/x.pth"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("spot.models.checkpoints.try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(InputError, match="give weights=FILE"):
        timm.create_model(DEIT, pretrained=True)


def test_a_script_runs_with_these_names(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, timm\nprint(__name__, sys.argv[1:], timm.is_model(sys.argv[2]))")
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "spot.timm", str(script), "--model", VIT],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == f"__main__ ['--model', '{VIT}'] True", done.stderr
