import json

import pytest

import spot
from tests.commands.conftest import command
from tests.conftest import make_nano
from tests.training.small_run import make_images

SMALL = ("img_size=32", "batch_size=8", "epochs=1", "warmup_epochs=0")
DISTIL = (*SMALL, "budgets=((4,9),(16,))", "shares=(1,0.5)", "weights=(1,1)")
MAE = (*SMALL, "decoder_width=32", "decoder_depth=1", "decoder_heads=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images") / "all")


@pytest.fixture(scope="module")
def flat(tmp_path_factory, data):
    """The same images without labels."""
    folder = tmp_path_factory.mktemp("flat")
    for file in data.rglob("*.png"):
        (folder / f"{file.parent.name}-{file.name}").write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano")
    make_nano().save_pretrained(folder)
    return folder


def test_distil_retrofits_unlabelled_images(nano, flat, tmp_path):
    command("retrofit", nano, "--data", flat, "--out", tmp_path / "run", "--set", *DISTIL)
    before, after = make_nano(), spot.load(tmp_path / "run" / "model")
    assert not before.vit.pos_embed.equal(after.vit.pos_embed)
    assert before.vit.head.weight.equal(after.vit.head.weight)  # head_rate is 0 in this recipe
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["recipe"]["batch_size"] == 8
    assert settings["images"]["count"] == 30


def test_pretrain_then_finetune_gives_a_classifier_with_mean_pooling(nano, flat, data, tmp_path):
    command("pretrain", nano, "--data", flat, "--out", tmp_path / "mae", "--set", *MAE)
    given = ("--recipe", "mae-finetune", "--data", data, "--out", tmp_path / "ft", "--set", *SMALL)
    command("finetune", tmp_path / "mae" / "model", *given)
    model = spot.load(tmp_path / "ft" / "model")
    assert model.vit.global_pool == "avg"
    assert model.num_classes == 10


def test_dry_run_shows_the_plan_and_writes_nothing_else(nano, data, tmp_path, capsys):
    given = ("--data", data, "--out", tmp_path / "run", "--recipe", "cls-in1k")
    command("retrofit", nano, *given, "--dry-run", "--set", "img_size=32", "batch_size=10", "epochs=8")
    shown = capsys.readouterr().out
    for word in ("parameter groups", "llrd", "30 images, 24 steps", "hours", "GB"):
        assert word in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (("data", "--set", "epoch=3"), "did you mean 'epochs'"),
        (("data", "--recipe", "mae-in1k"), "mae-in1k is a mae recipe"),
        (("data", "--workers", "-1"), "workers must be at least 0, got -1"),
        (("flat", "--recipe", "cls-in1k", "--set", *SMALL), "--recipe distil"),  # it needs labels
        (("empty",), "no image"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(nano, data, flat, tmp_path, refused, words, said):
    (tmp_path / "empty").mkdir()
    folders = {"data": data, "flat": flat, "empty": tmp_path / "empty"}
    given = ("--data", folders[words[0]], "--out", tmp_path / "run", *words[1:])
    assert said in refused("retrofit", nano, *given)
    assert not (tmp_path / "run").exists()
