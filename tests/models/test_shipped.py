import json
import os
import socket
import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file

import spot
from spot.errors import InputError
from spot.models import checkpoints
from spot.models.shipped import ALIASES, built_in
from tests.conftest import DEIT_TINY, VIT_TINY


def test_the_list_has_every_model_with_the_accuracy_of_its_card():
    """Read from the card by eye: the rows of isotropic tokens, of the delta as shipped."""
    assert {row["alias"] for row in spot.list_models()} - {""} == set(ALIASES)
    rows = {row["name"]: row["accuracy"] for row in spot.list_models()}
    assert rows.keys() == built_in().keys()
    card = (built_in()["scenes-a"].parent / "RETROFITS.md").read_text()
    line = next(line for line in card.splitlines() if line.startswith(f"| {DEIT_TINY}+spot |"))  # of the first table
    assert [float(cell) for cell in line.split("|")[2:6]] == list(rows[f"{DEIT_TINY}+spot"].values())


@pytest.mark.parametrize(
    "name, near",
    [
        ("deit_tiny+spot", f"{DEIT_TINY}+spot"),
        ("vit-t", "vit-ti"),
        ("scenes_a", "scenes-a"),
        ("vit_giant_patch14_dinov2+spot", "there is no model"),
    ],
)
def test_near_misses_are_suggested(name, near):
    with pytest.raises(InputError, match=near.replace("+", r"\+")):
        spot.load(name)


@pytest.mark.parametrize("name", [f"{VIT_TINY}+spot", "somebody/some-model", f"hf-hub:timm/{VIT_TINY}"])
def test_what_is_not_cached_is_refused_in_a_sentence_when_the_hub_is_off(name, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoints, "try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(InputError, match=r"^cannot download "):
        spot.load(name)


def test_a_revision_in_the_hubs_cache_needs_no_network(monkeypatch, tmp_path):
    """As downloads of hf-hub:timm/nano@v1 leave it, in a folder of the caller's."""
    folder, shape = tmp_path / "models--timm--nano", {"depth": 1, "embed_dim": 32, "num_heads": 2}
    snapshot = folder / "snapshots" / f"{1:040}"
    for path in (snapshot, folder / "refs"):
        path.mkdir(parents=True)
    (folder / "refs" / "v1").write_text(snapshot.name)
    about = {"num_classes": 1000, "first_conv": "patch_embed.proj", "classifier": "head"}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": shape, "pretrained_cfg": about}
    (snapshot / "config.json").write_text(json.dumps(config))
    trained = timm.create_model("vit_tiny_patch16_224", **shape)
    save_file(trained.state_dict(), snapshot / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = spot.load("hf-hub:timm/nano@v1", cache_dir=tmp_path)
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in model.vit.state_dict().items())


def test_without_a_network_a_command_ends_in_one_sentence(tmp_path):
    """The hub is a closed port here; its own retries would take up to a minute, ours is one request."""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment = {name: value for name, value in environment.items() if "PROXY" not in name.upper()}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        environment.pop(name, None)
    code = """import spot
for name in ("vit-ti", "somebody/some-model", "hf-hub:timm/some-model"):
    try: spot.load(name)
    except spot.errors.InputError as error: print(error)"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    sentences, names = done.stdout.splitlines(), (VIT_TINY, "somebody/some-model", "hf-hub:timm/some-model")
    assert all(map(str.startswith, sentences, (f"cannot download {name} (" for name in names)))
    assert len(sentences) == 3 and "weights=FILE" in sentences[0] and "Retrying" not in done.stderr


@pytest.mark.parametrize("name", ["vit-ti", "scenes-a", "vit_tiny_patch16_224", VIT_TINY])
def test_random_weights_need_no_network_and_no_file(name, monkeypatch):
    def unreachable(*_, **__):
        raise AssertionError("nothing is downloaded")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    first, second = (spot.load(name, pretrained=False, num_classes=5) for _ in range(2))
    assert first.num_classes == 5 and not first.training
    assert first.tokens == {"vit-ti": 49, "scenes-a": 64}.get(name, 196)
    assert not torch.equal(first.vit.blocks[0].attn.qkv.weight, second.vit.blocks[0].attn.qkv.weight)
    assert spot.load(name, pretrained=False, tokens=9)(torch.randn(1, 3, *first.img_size)).isfinite().all()


# Options are honoured or refused, wherever a model comes from


def test_options_are_honoured_for_a_built_in_model():
    model = spot.load("scenes-a", num_classes=0)
    images = torch.randn(2, 3, 64, 64)
    expected = spot.load("scenes-a")
    torch.testing.assert_close(model(images), expected.forward_head(expected.forward_features(images), pre_logits=True))
    large = spot.load("scenes-a", img_size=96)
    assert (large.img_size, large.tokens, large.num_classes) == ((96, 96), 144, 32)
    torch.testing.assert_close(large.vit.blocks.state_dict(), expected.vit.blocks.state_dict())


def test_options_are_honoured_or_refused_for_a_saved_model(nano, tmp_path):
    nano.save_pretrained(tmp_path)
    assert spot.load(tmp_path, num_classes=3)(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    for name in (tmp_path, "scenes-a", "vit_tiny_patch16_224"):
        with pytest.raises(InputError, match="tokns"):
            spot.load(name, tokns=9)
