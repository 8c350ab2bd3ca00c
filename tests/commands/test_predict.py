"""spot predict, as a person would type it."""

import json

import pytest
from PIL import Image

from spot.cli import main
from spot.models.checkpoints import save_folder


@pytest.fixture
def model(nano, tmp_path):
    save_folder(nano, tmp_path / "model")
    return str(tmp_path / "model")


def picture(path, size=(60, 40)):
    path.parent.mkdir(exist_ok=True)
    Image.radial_gradient("L").resize(size).convert("RGB").save(path)
    return str(path)


def test_a_goldfish_is_a_goldfish_even_through_100_windows(shared_data, tmp_path, capsys):
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    fish = shared_data / "imagenet-val-2k" / "n01443537" / "ILSVRC2012_val_00000994.jpg"
    wanted = ["--weights", str(shared_data / "weights" / f"{name}.safetensors"), "--tokens", "100", "--model", name]
    main(["predict", str(fish), *wanted, "--out", str(tmp_path), "--json", str(tmp_path / "out.json")])
    said = capsys.readouterr().out
    assert "goldfish, Carassius auratus" in said
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows[0]["class"] == "goldfish, Carassius auratus"
    assert rows[0]["index"] == 1
    assert len(rows) == 5
    assert 50 < rows[0]["probability"] <= 100
    assert sum(row["probability"] for row in rows) <= 100


def test_every_image_gets_a_picture_even_if_two_have_the_same_name(model, tmp_path):
    files = [picture(tmp_path / "a" / "x.png"), picture(tmp_path / "b" / "x.png"), picture(tmp_path / "a" / "y.jpg")]
    main(["predict", *files, "--model", model, "--out", str(tmp_path / "out")])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x-2.png", "x.png", "y.png"]


def test_classes_without_names_are_numbered_and_as_many_as_asked(model, tmp_path, capsys):
    file = picture(tmp_path / "a" / "x.png", (1, 1))
    wanted = ["--top", "3", "--tokens", "4", "--prior", "uniform", "--seed", "5"]
    main(["predict", file, "--model", model, "--out", str(tmp_path), "--json", str(tmp_path / "out.json"), *wanted])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["class"] for row in found["rows"]] == [f"class {row['index']}" for row in found["rows"]]
    assert len(found["rows"]) == 3
    assert (found["settings"]["prior"], found["settings"]["tokens"]) == ("uniform", 4)
    main(["predict", file, "--model", model, "--out", str(tmp_path), "--top", "100"])  # all ten


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (["--prior", "centre"], "'center'"),
        (["--saliency", "spectral"], "--saliency 'spectral' is for the priors salient"),
        (["--tokens", "-1"], "at least 1"),
        (["--top", "0"], "at least one class"),
        (["nowhere.jpg"], "nowhere.jpg is missing"),
    ],
)
def test_a_wrong_wish_is_answered_with_one_sentence(model, tmp_path, capsys, wrong, sentence):
    file = picture(tmp_path / "a" / "x.png")
    with pytest.raises(SystemExit) as ended:
        main(["predict", file, *wrong, "--model", model, "--out", str(tmp_path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert "\n" not in said
