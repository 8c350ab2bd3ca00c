"""spot evaluate, as a person would type it."""

import csv
import shutil
from functools import partial

import pytest
import torch
from PIL import Image

from spot.placement.files import Placements
from tests.commands.conftest import command
from tests.conftest import make_nano


@pytest.fixture
def evaluated(model, images, results):
    """Evaluate the model on the images, and return the rows and settings of the JSON file."""
    return partial(results, "evaluate", model, "--data", images, "--workers", 0)


def test_every_prior_budget_and_baseline_gets_a_row(evaluated, capsys):
    wanted = ["--prior", "isotropic", "uniform", "--tokens", "4", "9", "--seeds", "2"]
    rows, _ = evaluated(*wanted, "--baseline", "plain", "patch-dropout", "tome", "elastic")
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
    assert "waiting for data" in said and "isotropic" in said


def test_without_wishes_the_models_own_placement_is_measured(evaluated, images):
    (row,), settings = evaluated()
    assert (row["placement"], row["tokens"]) == ("isotropic", 16)
    assert settings["arguments"]["data"] == str(images)


def test_predictions_and_a_figure_are_written(evaluated, tmp_path):
    out = tmp_path / "out.csv"
    evaluated("--baseline", "plain", "--predictions", out, "--plot", tmp_path / "out.png")
    with out.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["key"] for line in lines] == sorted(f"{index % 10}/{index:02d}.png" for index in range(20))
    assert all(line["label"] == line["key"][0] for line in lines)
    assert {line["plain 16 seed 0"] for line in lines} <= {str(index) for index in range(10)}
    figure = Image.open(tmp_path / "out.png")
    assert figure.width > figure.height


def test_placements_from_a_file_are_measured_under_its_name(evaluated, tmp_path):
    keys = [f"{index % 10}/{index:02d}.png" for index in range(20)]
    files = [str(tmp_path / "found.safetensors"), str(tmp_path / "other" / "found.safetensors")]
    for file in files:
        Placements(keys, torch.rand(20, 3, 2)).save(file)
    rows, _ = evaluated("--placements", files[0])
    assert [(row["placement"], row["tokens"]) for row in rows] == [("found", 3)]
    rows, _ = evaluated("--placements", *files)  # of one name, but not two seeds of one placement
    assert [(row["placement"], row["seeds"]) for row in rows] == [(file, 1) for file in files]


def test_maps_are_from_the_models_own_source_or_the_options(evaluated, model, images, tmp_path, refused):
    assert evaluated("--prior", "salient", "--tokens", "4")[0][0]["placement"] == "salient"
    (tmp_path / "empty").mkdir()
    other = make_nano(num_classes=10)
    other.saliency = str(tmp_path / "empty")  # a folder of maps, without the map of any image
    other.save_pretrained(model)
    message = refused("evaluate", model, "--data", images, "--workers", 0, "--prior", "salient")
    assert "there is no saliency map for image '0/00.png'" in message
    rows, _ = evaluated("--prior", "salient", "--saliency", "spectral", "--tokens", "4")
    assert rows[0]["placement"] == "salient"


def test_neighbours_vote_from_images_and_from_a_file_of_features(evaluated, model, images, tmp_path, capsys):
    rows, _ = evaluated("--tokens", "4", "9", "--k", "1", "--knn", images)
    assert [row["knn"] for row in rows] == [100.0, 100.0]  # each is its own neighbour
    file = tmp_path / "features.safetensors"
    command("embed", images, "--model", model, "--tokens", 4, "--workers", 0, "--out", file)
    (row,), _ = evaluated("--tokens", "4", "--k", "1", "--knn", file)
    assert row["knn"] == 100.0
    assert "kNN" in capsys.readouterr().out


def test_neighbours_vote_for_classes_the_model_does_not_have(evaluated, model, images, tmp_path, capsys, refused):
    for name in map(str, range(4, 10)):
        shutil.rmtree(images / name)
    for name in map(str, range(4)):
        (images / name).rename(images / f"kind {name}")
    (row,), _ = evaluated("--knn", images, "--k", "1", "--tokens", "4")
    assert row["knn"] == 100.0 and "top1" not in row
    assert "only neighbours vote" in " ".join(capsys.readouterr().out.split())
    assert "10 unnamed classes, the data 4 class folders" in refused("evaluate", model, "--data", images)


def test_a_model_without_a_classifier_has_neighbours_only(evaluated, model, images, tmp_path, refused):
    make_nano(num_classes=0).save_pretrained(model)
    assert "its features can be measured with knn=FOLDER (--knn FOLDER)" in refused("evaluate", model, "--data", images)
    (row,), _ = evaluated("--knn", images, "--k", "1")
    assert row["knn"] == 100.0 and "top1" not in row


# Bad input -----------------------------------------------------------------------------------------


def test_neighbours_that_do_not_exist_are_refused(evaluated, model, images, tmp_path, refused):
    command = ["evaluate", model, "--data", images, "--workers", 0, "--tokens", 4, "--knn"]
    assert "bank.safetensors is missing" in refused(*command, tmp_path / "bank.safetensors")
    assert "holds 20 images, so k is from 1 to 20" in refused(*command, images, "--k", 21)


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
    assert "has no label" in refused("evaluate", model, "--data", images / "3", "--workers", 0)
    (images / "11").mkdir()
    assert "class" in refused("evaluate", model, "--data", images)


def test_an_unreadable_image_stops_the_run_or_is_counted(evaluated, model, images, capsys, refused):
    (images / "3" / "99.png").write_text("not an image")
    assert "3/99.png is not an image" in refused("evaluate", model, "--data", images, "--workers", 0)
    rows, settings = evaluated("--tokens", 4, "--skip-unreadable")
    assert rows[0]["images"] == 20 and settings["skipped"] == ["3/99.png"]
    assert "1 could not be read" in " ".join(capsys.readouterr().out.split())


def test_the_cost_of_a_map_is_counted(evaluated, monkeypatch):
    rows, _ = evaluated("--prior", "isotropic", "focus", "--tokens", "4")
    monkeypatch.setattr("spot.evaluation.compare.map_macs", lambda source: 10**9)
    dearer, _ = evaluated("--prior", "isotropic", "focus", "--tokens", "4")
    assert dearer[0]["gmacs"] == rows[0]["gmacs"]
    assert dearer[1]["gmacs"] > rows[1]["gmacs"] + 0.9
