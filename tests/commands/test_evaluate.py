"""spot evaluate, as a person would type it."""

import csv
import json

import pytest
import torch
from PIL import Image

import spot
from spot.cli import main
from spot.evaluation.knn import Bank
from spot.hashes import hash_model
from spot.models.checkpoints import save_folder
from spot.placement.files import Placements
from tests.conftest import write_noise


@pytest.fixture
def images(tmp_path):
    """Twenty images in ten class folders."""
    return write_noise(tmp_path / "images", 20)


def rows_of(path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def test_every_prior_budget_and_baseline_gets_a_row(model, images, tmp_path, capsys):
    out = tmp_path / "out.json"
    wanted = ["--prior", "isotropic", "uniform", "--tokens", "4", "9", "--seeds", "2"]
    wanted += ["--baseline", "plain", "patch-dropout", "tome", "elastic"]
    main(["evaluate", model, "--data", str(images), *wanted, "--workers", "0", "--json", str(out)])
    rows = rows_of(out)
    assert [(row["placement"], row["tokens"], row["seeds"]) for row in rows] == [
        ("plain", 16, 1),
        ("patch-dropout", 4, 2),
        ("patch-dropout", 9, 2),
        ("tome", 4, 1),  # on the grid nothing is drawn
        ("tome", 9, 1),
        ("elastic", 4, 2),
        ("elastic", 9, 2),
        ("isotropic", 4, 1),
        ("isotropic", 9, 1),
        ("uniform", 4, 2),
        ("uniform", 9, 2),
    ]
    assert all(row["images"] == 20 for row in rows)
    assert rows[0]["gmacs"] > rows[1]["gmacs"] > 0
    said = capsys.readouterr().out
    assert "waiting for data" in said
    assert "isotropic" in said


def test_without_wishes_the_models_own_placement_is_measured(model, images, tmp_path):
    main(["evaluate", model, "--data", str(images), "--workers", "0", "--json", str(tmp_path / "out.json")])
    (row,) = rows_of(tmp_path / "out.json")
    assert (row["placement"], row["tokens"]) == ("isotropic", 16)
    arguments = json.loads((tmp_path / "out.json").read_text())["settings"]["arguments"]
    assert arguments["data"] == str(images)


def test_predictions_are_written_image_by_image(nano, model, images, tmp_path):
    out = tmp_path / "out.csv"
    main(["evaluate", model, "--data", str(images), "--baseline", "plain", "--workers", "0", "--predictions", str(out)])
    with out.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["key"] for line in lines] == sorted(f"{index % 10}/{index:02d}.png" for index in range(20))
    assert all(line["label"] == line["key"][0] for line in lines)
    assert {line["plain 16 seed 0"] for line in lines} <= {str(index) for index in range(10)}


def test_a_picture_shows_accuracy_against_cost(model, images, tmp_path):
    out = tmp_path / "out.png"
    wanted = ["--tokens", "4", "9", "--limit", "5", "--workers", "0", "--plot", str(out)]
    main(["evaluate", model, "--data", str(images), *wanted])
    assert Image.open(out).width > Image.open(out).height


def test_placements_from_a_file_are_measured_under_its_name(model, images, tmp_path):
    keys = [f"{index % 10}/{index:02d}.png" for index in range(20)]
    Placements(keys, torch.rand(20, 3, 2)).save(tmp_path / "found.safetensors")
    wanted = ["--placements", str(tmp_path / "found.safetensors"), "--json", str(tmp_path / "out.json")]
    main(["evaluate", model, "--data", str(images), "--workers", "0", *wanted])
    assert [(row["placement"], row["tokens"]) for row in rows_of(tmp_path / "out.json")] == [("found", 3)]
    Placements(keys, torch.rand(20, 3, 2)).save(tmp_path / "other" / "found.safetensors")
    files = [str(tmp_path / "found.safetensors"), str(tmp_path / "other" / "found.safetensors")]
    main(["evaluate", model, "--data", str(images), "--workers", "0", "--placements", *files, *wanted[2:]])
    rows = rows_of(tmp_path / "out.json")  # of one name, but not two seeds of one placement
    assert [(row["placement"], row["seeds"]) for row in rows] == [(file, 1) for file in files]


@pytest.mark.parametrize("named", [(), ("--saliency", "spectral")])
def test_salient_placements_take_maps_from_a_saliency(model, images, tmp_path, named):
    wanted = ["--prior", "salient", *named, "--tokens", "4", "--json", str(tmp_path / "out.json")]
    main(["evaluate", model, "--data", str(images), "--workers", "0", *wanted])
    assert rows_of(tmp_path / "out.json")[0]["placement"] == "salient"


def test_neighbours_vote_from_images_and_then_from_the_cache(model, images, tmp_path, capsys):
    wanted = ["--tokens", "4", "9", "--k", "1", "--workers", "0", "--cache", str(tmp_path / "cache")]
    command = ["evaluate", model, "--data", str(images), "--knn", str(images), *wanted]
    main([*command, "--json", str(tmp_path / "out.json")])
    assert [row["knn"] for row in rows_of(tmp_path / "out.json")] == [100.0, 100.0]  # each is its own neighbour
    assert len(list((tmp_path / "cache" / "banks").iterdir())) == 2
    assert "kNN" in capsys.readouterr().out


def test_neighbours_vote_for_classes_the_model_does_not_have(model, images, tmp_path, capsys, refused):
    for name in map(str, range(4, 10)):
        for path in (images / name).iterdir():
            path.unlink()
        (images / name).rmdir()
    for name in map(str, range(4)):
        (images / name).rename(images / f"kind {name}")
    wanted = ["--knn", str(images), "--k", "1", "--tokens", "4", "--workers", "0", "--cache", str(tmp_path / "cache")]
    main(["evaluate", model, "--data", str(images), *wanted, "--json", str(tmp_path / "out.json")])
    (row,) = rows_of(tmp_path / "out.json")
    assert row["knn"] == 100.0
    assert "top1" not in row
    assert "only neighbours vote" in " ".join(capsys.readouterr().out.split())
    assert "10 unnamed classes, the data 4 class folders" in refused("evaluate", model, "--data", images)


def test_a_model_without_a_classifier_has_neighbours_only(images, tmp_path, refused):
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 0}
    save_folder(spot.adapt("vit_tiny_patch16_224", **shape), tmp_path / "model")
    model = str(tmp_path / "model")
    assert "its features can be measured with knn=FOLDER (--knn FOLDER)" in refused("evaluate", model, "--data", images)
    wanted = ["--knn", str(images), "--k", "1", "--workers", "0", "--cache", str(tmp_path / "cache")]
    main(["evaluate", model, "--data", str(images), *wanted, "--json", str(tmp_path / "out.json")])
    (row,) = rows_of(tmp_path / "out.json")
    assert row["knn"] == 100.0
    assert "top1" not in row


# Bad input -----------------------------------------------------------------------------------------


def test_a_bank_with_other_features_is_refused(nano, model, images, tmp_path, refused):
    path = tmp_path / "bank.safetensors"
    wanted = [model, "--data", images, "--knn", path, "--workers", 0, "--tokens", 4, "--k", 1]
    assert "bank.safetensors is missing" in refused("evaluate", *wanted)
    Bank(torch.eye(7), torch.arange(7)).save(path)
    assert "has features of width 7, the model of width 32" in refused("evaluate", *wanted)
    Bank(torch.eye(32), torch.arange(32) % 10, {"weights": "0" * 16}).save(path)
    assert "was made with weights=" in refused("evaluate", *wanted)
    Bank(torch.eye(32), torch.arange(32) % 10, {"weights": hash_model(nano)}).save(path)
    assert "holds 32 images, so k is from 1 to 32" in refused("evaluate", *wanted[:-1], 33)
    main(["evaluate", *map(str, wanted)])


def test_a_budget_larger_than_the_grid_is_refused_for_patches_and_not_for_windows(model, images, refused):
    few = [model, "--data", images, "--tokens", 17, "--limit", 2, "--workers", 0]
    assert "at most the 16 patches" in refused("evaluate", *few, "--baseline", "patch-dropout")
    assert "17" in refused("evaluate", *few, "--baseline", "tome")
    main(["evaluate", *map(str, few), "--prior", "isotropic"])


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (["--prior", "isotropik"], "did you mean 'isotropic'"),
        (["--tokens", "0"], "at least 1"),
        (["--seeds", "0"], "at least one seed"),
        (["--limit", "0"], "limit of 0"),
        (["--batch-size", "0"], "batch size of 0"),
        (["--workers", "-1"], "workers must be at least 0, got -1"),
        (["--split", "tset"], "'test'"),
        (["--plot", "out.xyz"], "a picture can be"),
        (["--placements", "nowhere.safetensors"], "nowhere.safetensors is missing"),
    ],
)
def test_a_wrong_wish_is_answered_with_one_sentence(model, images, refused, wrong, sentence):
    assert sentence in refused("evaluate", model, "--data", images, "--workers", 0, *wrong)


def test_data_that_cannot_be_measured_is_refused(model, images, tmp_path, refused):
    assert "is missing" in refused("evaluate", model, "--data", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no image in" in refused("evaluate", model, "--data", tmp_path / "empty")
    assert "has no label" in refused("evaluate", model, "--data", images / "3", "--workers", 0)
    (images / "11").mkdir()
    assert "class" in refused("evaluate", model, "--data", images)


def test_an_unreadable_image_stops_the_run_or_is_counted(model, images, tmp_path, capsys, refused):
    (images / "3" / "99.png").write_text("not an image")
    wanted = [model, "--data", images, "--tokens", 4, "--workers", 0]
    assert "3/99.png is not an image" in refused("evaluate", *wanted)
    main(["evaluate", *map(str, wanted), "--skip-unreadable", "--json", str(tmp_path / "out.json")])
    assert rows_of(tmp_path / "out.json")[0]["images"] == 20
    assert json.loads((tmp_path / "out.json").read_text())["settings"]["skipped"] == ["3/99.png"]
    assert "1 could not be read" in " ".join(capsys.readouterr().out.split())
