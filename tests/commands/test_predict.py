"""spot predict, as a person would type it."""

import csv
import json
import os

import pytest
import torch
from PIL import Image

import spot
from spot.commands.predict import predict as predict_verb
from spot.data.folders import photo_files
from spot.data.picture import evaluation_transform
from spot.errors import InputError
from spot.evaluation.photos import predict
from spot.models.tome import Merging
from tests.commands.conftest import command
from tests.conftest import make_nano
from tests.data.files import picture


def test_a_goldfish_is_a_goldfish_even_through_100_windows(shared_data, tmp_path, results, capsys):
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    fish = shared_data / "imagenet-val-2k" / "n01443537" / "ILSVRC2012_val_00000994.jpg"
    wanted = ["--weights", shared_data / "weights" / f"{name}.safetensors", "--tokens", 100, "--model", name]
    rows, _ = results("predict", fish, *wanted, "--out", tmp_path)
    assert "goldfish, Carassius auratus" in capsys.readouterr().out
    assert rows[0]["class"] == "goldfish, Carassius auratus"
    assert rows[0]["index"] == 1
    assert len(rows) == 5
    assert 50 < rows[0]["probability"] <= 100
    assert sum(row["probability"] for row in rows) <= 100


def test_every_image_gets_a_picture_even_if_two_have_the_same_name(model, tmp_path):
    files = [picture(tmp_path / "a" / "x.png"), picture(tmp_path / "b" / "x.png"), picture(tmp_path / "a" / "y.jpg")]
    command("predict", *files, "--model", model, "--out", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x-2.png", "x.png", "y.png"]


def test_with_merge_more_windows_are_placed_and_merged_at_the_same_cost(tmp_path, results):
    file, model = tmp_path / "x.png", spot.load("scenes-a")
    Image.radial_gradient("L").convert("RGB").save(file)
    wanted = ["--tokens", 16, "--prior", "center", "--merge"]
    rows, settings = results("predict", file, "--model", "scenes-a", *wanted)
    merging = Merging(model, 16, "center")
    images = evaluation_transform(model.data_config)(Image.open(file).convert("RGB"))[None]
    with torch.no_grad():
        expected = merging(images, model.place(images, tokens=merging.starting_tokens, prior="center")).softmax(1)[0]
    said = [expected[row["index"]].item() * 100 for row in rows]
    assert [row["probability"] for row in rows] == pytest.approx(said, rel=1e-3)
    assert settings["merge"] and said == sorted(said, reverse=True)
    (made,) = predict(model, [file], tokens=16, merge=True)
    assert len(made.positions) == merging.starting_tokens > 16
    with pytest.raises(InputError, match="until needs a cascade"):
        next(predict(model, [file], until=0.8, merge=True))


def test_classes_without_names_are_numbered_and_as_many_as_asked(model, tmp_path, results):
    file = picture(tmp_path / "a" / "x.png", size=(1, 1))
    wanted = ["--tokens", 4, "--prior", "uniform", "--seed", 5]
    rows, settings = results("predict", file, "--model", model, "--top", 3, *wanted)
    assert [row["class"] for row in rows] == [f"class {row['index']}" for row in rows]
    assert len(rows) == 3
    assert (settings["prior"], settings["tokens"]) == ("uniform", 4)
    assert len(results("predict", file, "--model", model, "--top", 100)[0]) == 10


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (["--prior", "centre"], "'center'"),
        (["--saliency", "spectral"], "got saliency 'spectral', but no prior"),
        (["--tokens", "-1"], "at least 1"),
        (["--top", "0"], "top must be at least 1"),
        (["nowhere.jpg"], "nowhere.jpg is missing"),
    ],
)
def test_a_wrong_wish_is_answered_with_one_sentence(model, tmp_path, refused, wrong, sentence):
    file = picture(tmp_path / "a" / "x.png")
    assert sentence in refused("predict", file, *wrong, "--model", model, "--out", tmp_path)


# Files -------------------------------------------------------------------------------------------------


def test_folders_and_patterns_are_taken_with_their_sub_folders(tmp_path):
    for name in ("a.png", "in/b.png", "in/deep/c.png", "other/d.png"):
        picture(tmp_path / name)
    (tmp_path / "in" / "no.txt").write_text("")
    picture(tmp_path / "linked" / "e.png")
    for name in ("one", "two"):  # each of two self-links would double the number of paths at every depth
        (tmp_path / "in" / name).symlink_to(tmp_path / "in")
        (tmp_path / "in" / f"{name}-more").symlink_to(tmp_path / "linked")
    files = photo_files([tmp_path / "a.png", tmp_path / "in", f"{tmp_path}/oth*/*.png"])
    assert [file.name for file in files] == ["a.png", "b.png", "c.png", "e.png", "d.png"]
    with pytest.raises(InputError, match="no image matches"):
        photo_files([f"{tmp_path}/*.jpg"])


def test_a_file_whose_name_looks_like_a_pattern_or_like_markup_is_itself(model, tmp_path, capsys):
    names = ["a[b].png", "[bold]$x_1$ $y$.png", os.fsdecode(b"caf\xe9 [red].png")]
    for name in names:
        picture(tmp_path / "odd" / name)
    odd, out = tmp_path / "odd", tmp_path / "out"
    command("predict", odd / "a[b].png", odd, "--model", model, "--out", out, "--csv", tmp_path / "c")
    lines = list(csv.DictReader((tmp_path / "c").read_text(errors="surrogateescape").splitlines()))
    assert {os.path.basename(line["image"]) for line in lines} == set(names)
    said = capsys.readouterr().out.replace("\n", "")
    assert "[bold]$x_1$ $y$.png" in said
    assert "caf\ufffd [red].png" in said
    assert len(list(out.iterdir())) == 3


def test_what_cannot_be_read_stops_the_run_or_is_named_and_left_out(model, tmp_path, capsys, results, refused):
    file = picture(tmp_path / "all" / "good.png")
    (tmp_path / "all" / "bad.png").write_text("no")
    given = ["predict", tmp_path / "all", "--model", model]
    assert "bad.png is not an image; skip=True (--skip-unreadable) continues without it" in refused(*given)
    rows, _ = results(*given, "--skip-unreadable")
    assert "bad.png" in capsys.readouterr().err
    assert {row["image"] for row in rows} == {str(file)}


def test_standard_output_gets_data_and_nothing_else(model, tmp_path, capsys):
    command("predict", picture(tmp_path / "x.png"), "--model", model, "--json", "-", "--top", 2)
    said = capsys.readouterr()
    assert len(json.loads(said.out)["rows"]) == 2
    assert "probability" in said.err


# Whole images ------------------------------------------------------------------------------------------


def test_a_whole_panorama_is_seen_in_its_own_shape():
    config = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    wide = Image.new("RGB", (400, 100))
    wide.paste("red", (380, 0, 400, 100))  # at its right end, which the middle square does not have
    shapes = {fit: tuple(evaluation_transform(config, fit=fit)(wide).shape) for fit in ("crop", "squash", "whole")}
    assert shapes == {"crop": (3, 32, 32), "squash": (3, 32, 32), "whole": (3, 16, 64)}
    reddest = {fit: evaluation_transform(config, fit=fit)(wide)[0].max().item() for fit in shapes}
    assert reddest["crop"] == -1.0  # black
    assert reddest["squash"] > 0.9
    assert reddest["whole"] > 0.9


@pytest.mark.parametrize("prior", ["isotropic", "center", "focus"])
def test_tokens_on_a_whole_image_are_where_the_same_fractions_say(nano, tmp_path, prior):
    wide = Image.effect_noise((160, 40), 80).convert("RGB")
    wide.save(tmp_path / "wide.png")
    (made,) = predict(nano, [tmp_path / "wide.png"], prior=prior, tokens=12, fit="whole", top=1)
    assert made.image.shape == (3, 16, 64)
    assert made.positions.shape == (12, 2)
    assert (made.map is not None) == (prior == "focus")
    if prior == "isotropic":  # the same even spacing in pixels either way: more columns than rows
        columns, rows = (len(made.positions[:, axis].unique()) for axis in (1, 0))
        assert columns > rows


@pytest.mark.parametrize("option", [{"tokens": 0}, {"tokens": 9}, {"until": 0.0}, {"fit": "whole"}, {"merge": True}])
def test_an_exported_file_takes_no_options_of_the_model(option):
    with pytest.raises(InputError, match=f"--{next(iter(option))} goes with --runtime torch"):
        predict_verb(("x.png",), model="no.onnx", runtime="onnx", **option)


def test_a_model_of_one_channel_classifies_photographs_in_grey(tmp_path, results):
    make_nano(in_chans=1).save_pretrained(tmp_path / "grey")
    file = picture(tmp_path / "x.png")
    rows, _ = results("predict", file, "--model", tmp_path / "grey", "--tokens", 4, "--top", 1)
    model = spot.load(tmp_path / "grey")
    image = Image.open(file).convert("L")
    assert model.transform()(image).shape == model.transform()(image.convert("RGB")).shape == (1, 32, 32)
    logits = model(model.transform()(image)[None], tokens=4)
    assert rows[0]["index"] == int(logits.argmax())
