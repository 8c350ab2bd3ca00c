"""The paper's third model: a published MAE is retrofitted with its decoder."""

import json

import pytest
import torch

import spot
from spot.cli import main
from spot.training.objectives import Masked
from tests.models.test_mae import SHAPE, published
from tests.training.small_run import make_images, small_recipe

MAE = {"decoder_width": 24, "decoder_depth": 3, "decoder_heads": 2, "epochs": 1.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images") / "all")


def written(tmp_path, **how):
    torch.save({"model": published(**how)}, tmp_path / "mae.pth")
    return tmp_path / "mae.pth"


def encoder(file):
    return spot.load("vit_tiny_patch16_224", weights=file, num_classes=0, **SHAPE)


@pytest.fixture
def pretrain(tmp_path, data, monkeypatch):
    """spot pretrain --weights FILE, of a small ViT."""
    changes = ("img_size=32", "batch_size=8", "warmup_epochs=0", *(f"{name}={value}" for name, value in MAE.items()))
    given = ("vit_tiny_patch16_224", "--data", str(data), "--out", str(tmp_path / "run"), "--set", *changes)

    def call(file, *more):
        loaded = encoder(file)
        with monkeypatch.context() as patch:
            patch.setattr("spot.models.loading.load_source", lambda name, weights: loaded)
            main(["pretrain", *given, "--weights", str(file), *more])

    return call


def test_retrofitting_goes_on_with_the_decoder_of_the_file(tmp_path, pretrain, capsys):
    first = Masked(encoder(written(tmp_path)), small_recipe("mae-in1k", **MAE), published()).autoencoder.decoder
    torch.testing.assert_close(first.blocks[2].mlp.fc1.weight, published()["decoder_blocks.2.mlp.fc1.weight"])
    pretrain(written(tmp_path))
    assert "no decoder" not in capsys.readouterr().out
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert len(settings["decoder"]["weights"]) == 16
    assert spot.load(tmp_path / "run" / "model").num_classes == 0


def test_without_a_decoder_one_sentence_says_that_a_new_one_begins(tmp_path, pretrain, capsys):
    pretrain(written(tmp_path, decoder=False), "--dry-run")
    printed = " ".join(capsys.readouterr().out.split())
    assert "has no decoder, so training starts with a new one" in printed
    assert "mae_pretrain_vit_base_full.pth" in printed
