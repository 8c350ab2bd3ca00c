"""spot calibrate, evaluate --cascade and predict --until belong together."""

import json

import pytest
from torchvision.transforms.functional import to_pil_image

import spot
from spot.data.scenes import Scenes
from tests.commands.conftest import command

C = "c.cascade.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model, and a cascade that was calibrated for it."""
    folder = tmp_path_factory.mktemp("calibrate")
    spot.load("scenes-a").save_pretrained(folder / "model")
    words = ["--limit", 64, "--workers", 0, "--agree", 0.9, "--tokens", 9, 25]
    command("calibrate", folder / "model", "--data", "scenes", *words, "--out", folder / C)
    to_pil_image(Scenes("test", 2)[0][0]).save(folder / "photo.png")
    return folder


def test_evaluate_shows_what_early_exit_costs(folder, results):
    made = json.loads((folder / C).read_text())["made"]
    assert made["images"] == 64 and made["agreed"] >= 0.9
    words = ["--data", "scenes", "--limit", 32, "--workers", 0]
    (dense, row), _ = results("evaluate", folder / "model", *words, "--cascade", folder / C)
    assert row["placement"] == "early-exit" and row["images"] == 32
    assert row["gmacs"] < dense["gmacs"]


def test_predict_exits_early(folder, results):
    words = ["predict", folder / "photo.png", "--model", folder / "model"]
    assert len(results(*words, "--cascade", folder / C, "--until", 0.01)[0]) == 5


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["predict", "photo.png", "--model", "scenes-a", "--until", "0.8"], "has no calibrated cascade"),
        (["predict", "photo.png", "--model", "model", "--cascade", C, "--until", "80"], "until is a confidence"),
        (["predict", "photo.png", "--model", "model", "--cascade", C, "--tokens", "9"], "a cascade sets the placement"),
        (["predict", "photo.png", "--model", "scenes-b", "--cascade", C], "calibrated for other weights"),
        (["evaluate", "scenes-a", "--data", "scenes", "--limit", "8", "--early-exit"], "has no calibrated cascade"),
        (
            ["calibrate", "scenes-a", "--data", "scenes", "--out", "a.json", "--prior", "p.safetensors"],
            "cannot be a file here",
        ),
        (["calibrate", "scenes-a", "--data", "scenes", "--out", "a.json", "--only", "none.txt"], "no file none.txt"),
        (["calibrate", "scenes-a", "--data", "scenes", "--out", "a.json", "--runtime", "onnx"], "goes with --time"),
        (["evaluate", "scenes-a", "--data", "scenes", "--limit", "8", "--prior", "learned"], "has no learned prior"),
    ],
)
def test_bad_input_is_one_sentence(folder, monkeypatch, refused, words, sentence):
    monkeypatch.chdir(folder)
    assert sentence in refused(*words)


def test_only_names_the_images_to_calibrate_on(folder, tmp_path):
    for number in range(4):
        to_pil_image(Scenes("test", 4)[number][0]).save(tmp_path / f"{number}.png")
    (tmp_path / "some.txt").write_text("1.png\n3.png\n")
    words = ["--workers", 0, "--agree", 0.5, "--tokens", 9, "--no-merge", "--only", tmp_path / "some.txt"]
    command("calibrate", folder / "model", "--data", tmp_path, *words, "--out", tmp_path / C)
    assert json.loads((tmp_path / C).read_text())["made"]["images"] == 2
