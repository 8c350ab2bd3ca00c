import pytest
from PIL import Image

from spot.evaluation.searches import class_numbers
from spot.placement.files import Placements
from tests.commands.conftest import command
from tests.conftest import VIT_TINY


def test_a_picture_per_image_and_a_table(model, images, tmp_path, results, capsys):
    files, out = [images / "0" / "00.png", images / "1" / "01.png"], tmp_path / "out"
    rows, _ = results("search", *files, "--model", model, "--label", 3, 7, "--tokens", 4, "--out", out)
    assert sorted(file.name for file in out.iterdir()) == ["00.png", "01.png"]
    assert Image.open(out / "00.png").width > 1000
    assert [row["class"] for row in rows] == ["class 3", "class 7"]
    assert all(row["after"] > row["before"] for row in rows)
    assert "00.png" in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["ascent", "obfuscate", "entropy", None])
def test_every_objective_runs_and_without_labels_the_dense_prediction_is_the_goal(
    model, images, tmp_path, results, objective
):
    wanted = ["--grid", "--preset", "paper-long", "--prior", "uniform", "--out", tmp_path / "one.png"]
    wanted += ["--objective", objective] if objective else []
    wanted += ["--label", "3"] if objective in ("ascent", "obfuscate") else []
    _, settings = results("search", images / "0" / "00.png", "--model", model, "--tokens", 4, *wanted)
    assert (tmp_path / "one.png").exists()
    assert settings["steps"] == 10
    assert settings["grid"] == [4, 4]
    assert settings["objective"] == (objective or "agree")


def test_a_data_set_becomes_a_placements_file_that_evaluate_reads(model, images, tmp_path, results, capsys):
    out = tmp_path / "p.safetensors"
    search = ["search", "--data", images, "--model", model, "--tokens", 4, "--out", out, "--workers", 0]
    command(*search, "--limit", 10)
    assert "10 searched now" in " ".join(capsys.readouterr().out.split())
    command(*search)
    assert "10 were there before" in " ".join(capsys.readouterr().out.split())
    kept = Placements.load(out)
    assert len(kept) == 20
    assert "3/13.png" in kept
    ((row,), _) = results("evaluate", model, "--data", images, "--placements", out, "--workers", 0)
    # The search saw the same accuracy at its last step as the evaluation of its file.
    right = (kept.values["predictions"][:, -1] == kept.values["labels"]).double().mean().item()
    assert row["top1"] == pytest.approx(100 * right)
    assert row["tokens"] == 4


def test_starts_can_be_drawn_from_maps_on_disk(model, images, tmp_path):
    maps = tmp_path / "maps"
    command("saliency", "--data", images, "--out", maps)
    command("search", "--data", images, "--model", model, "--tokens", 4, "--prior", "salient", "--saliency", maps,
            "--out", tmp_path / "p.safetensors", "--workers", 0)  # fmt: skip
    about = Placements.load(tmp_path / "p.safetensors").metadata
    assert about["prior"] == "salient"
    assert about["saliency"] == "maps"


def test_bad_input_is_one_sentence_and_leaves_nothing(model, images, tmp_path, refused):
    image, out = images / "0" / "00.png", tmp_path / "out"
    common = ("--model", model, "--tokens", "4", "--out", out)
    assert "either images or --data" in refused("search", *common)
    assert "either images or --data" in refused("search", image, "--data", images, *common)
    assert "0 and 9" in refused("search", image, "--label", "10", *common)
    three = [images / f"{index}" / f"0{index}.png" for index in range(3)]
    assert "one label for all" in refused("search", *three, "--label", "1", "2", *common)
    assert "needs labels" in refused("search", image, "--objective", "ascent", *common)
    assert "at least 1 step" in refused("search", image, "--steps", "0", *common)
    assert "missing" in refused("search", tmp_path / "no.jpg", *common)
    assert "no saliency 'spectra'" in refused("search", image, "--prior", "salient", "--saliency", "spectra", *common)
    assert "no prior that draws from maps" in refused("search", image, "--saliency", "spectral", *common)
    assert "did you mean" in refused("search", image, "--prior", "isotropc", *common)
    assert ".safetensors" in refused("search", "--data", images, *common)
    assert "brings its own labels" in refused("search", "--data", images, "--label", "1", *common)
    assert not out.exists()


def test_classes_are_known_by_number_name_synonym_and_folder(vit_tiny):
    given = ["1", "Tinca tinca", "goldfish", "n01443537"]  # tench, Tinca tinca; goldfish, Carassius auratus
    assert class_numbers(given, 4, vit_tiny) == [1, 0, 1, 1]
    assert class_numbers(["tench"], 3, vit_tiny) == [0, 0, 0]


def test_a_real_photograph_with_a_real_model(shared_data, tmp_path, results):
    weights = shared_data / "weights" / f"{VIT_TINY}.safetensors"
    (image, *_) = sorted((shared_data / "imagenet-val-2k" / "n02099601").iterdir())
    wanted = ["--label", "golden retriever", "--tokens", 49, "--out", tmp_path]
    ((row,), _) = results("search", image, "--model", VIT_TINY, "--weights", weights, *wanted)
    assert row["class"] == "golden retriever"
    assert row["after"] > 2 * row["before"]
