import os
import socket
import subprocess
import sys
import time

import pytest
import torch

import spot
from spot.errors import InputError
from spot.models.checkpoints import built_in
from spot.models.reach import ALIASES
from tests.conftest import DEIT_TINY, VIT_TINY


def test_every_model_that_comes_with_the_package_is_listed():
    rows = {row["name"]: row for row in spot.list_models()}
    assert rows.keys() == built_in().keys()
    assert {row["alias"] for row in rows.values()} - {""} == set(ALIASES)
    assert rows["scenes-a"]["needs"] == "nothing"
    assert VIT_TINY in rows[f"{VIT_TINY}+spot"]["needs"]


def test_accuracies_are_those_of_the_cards():
    """Read from the card by eye: the rows of isotropic tokens, of the delta as shipped."""
    rows = {row["name"]: row["accuracy"] for row in spot.list_models()}
    assert rows[f"{VIT_TINY}+spot"].keys() == {25, 49, 100, 196}
    assert rows["scenes-a"].keys() == {9, 16, 36, 64}
    card = (built_in()["scenes-a"].parent / "RETROFITS.md").read_text()
    line = next(line for line in card.splitlines() if line.startswith(f"| {DEIT_TINY}+spot |"))  # of the first table
    assert [float(cell) for cell in line.split("|")[2:6]] == list(rows[f"{DEIT_TINY}+spot"].values())


@pytest.mark.parametrize(
    "name, near", [("deit_tiny+spot", f"{DEIT_TINY}+spot"), ("vit-t", "vit-ti"), ("scenes_a", "scenes-a")]
)
def test_near_misses_are_suggested(name, near):
    with pytest.raises(InputError, match=near.replace("+", r"\+")):
        spot.load(name)


@pytest.mark.parametrize("name", [VIT_TINY, f"{VIT_TINY}+spot", "vit-ti", "somebody/some-model"])
def test_without_a_network_a_download_is_refused_at_once(name, monkeypatch, tmp_path):
    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr("spot.models.reach.getproxies", dict)
    monkeypatch.setattr("spot.models.checkpoints.try_to_load_from_cache", lambda *_: None)
    began = time.perf_counter()
    with pytest.raises(InputError, match="cannot be reached"):
        spot.load(name)
    assert time.perf_counter() - began < 2.5


def test_a_name_that_cannot_be_looked_up_is_given_up_after_two_seconds(monkeypatch):
    from spot.models.reach import reachable

    monkeypatch.setattr("spot.models.reach.getproxies", dict)

    def slow(*_, **__):
        time.sleep(5)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "create_connection", slow)
    began = time.perf_counter()
    assert not reachable("nowhere.example", 443)
    assert time.perf_counter() - began < 3


def test_without_a_network_a_command_ends_before_anything_heavy_is_imported(tmp_path):
    code = (
        "import sys; from spot.cli import main\n"
        "try: main(['predict', 'photo.jpg'])\n"
        "finally: print(sorted({'torch', 'timm', 'huggingface_hub', 'matplotlib'} & set(sys.modules)))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[]" and done.returncode == 2
    assert done.stderr.strip().endswith("huggingface.co cannot be reached; pass --weights FILE if you have them")


# Options are honoured or refused, wherever a model comes from


def test_options_are_honoured_for_a_built_in_model():
    model = spot.load("scenes-a", num_classes=0)
    images = torch.randn(2, 3, 64, 64)
    expected = spot.load("scenes-a")
    torch.testing.assert_close(model(images), expected.forward_head(expected.forward_features(images), pre_logits=True))
    large = spot.load("scenes-a", img_size=96)
    assert (large.img_size, large.tokens, large.num_classes) == ((96, 96), 144, 32)
    torch.testing.assert_close(large.vit.blocks.state_dict(), expected.vit.blocks.state_dict())


def test_options_are_honoured_for_a_retrofit(shared_data):
    weights = shared_data / "weights" / f"{VIT_TINY}.safetensors"
    model, whole = (spot.load("vit-ti", weights=weights, **options) for options in ({"num_classes": 0}, {}))
    images = torch.randn(1, 3, 224, 224)
    assert model(images).shape == (1, 192)
    torch.testing.assert_close(model.forward_features(images), whole.forward_features(images))


@pytest.mark.parametrize("name", ["scenes-a", "vit_tiny_patch16_224"])
def test_an_option_that_nobody_knows_is_refused(name, tmp_path):
    with pytest.raises(InputError, match="tokns"):
        spot.load(name, tokns=9)


def test_an_option_for_a_saved_model_is_refused_too(nano, tmp_path):
    nano.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="tokns"):
        spot.load(tmp_path, tokns=9)
    assert spot.load(tmp_path, num_classes=3)(torch.randn(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "hf-hub:somebody/model"},
        {"model": "local-dir:/tmp"},
        {"options": {"checkpoint_path": "x.pth"}},
        {"options": {"pretrained": True}},
        {"data": {"url": "http://example.org/x.pth"}},
    ],
)
def test_a_files_header_cannot_make_timm_open_or_fetch_anything(nano, change):
    from spot.models.checkpoints import build, describe

    config = describe(nano)
    for part, value in change.items():
        config[part] = {**config[part], **value} if isinstance(value, dict) else value
    with pytest.raises(InputError, match="refused"):
        build(config)
