"""Several glimpses of a picture in one batch."""

import numpy as np
import pytest
import torch
from PIL import Image

import spot
from spot.cli import main
from spot.data.picture import open_image
from spot.errors import InputError
from spot.evaluation.compare import compare
from spot.models.glimpsed import Glimpsed
from spot.placement.finder import Finder
from spot.placement.glimpses import glimpse_positions
from tests.tokens.test_regions import NANO, nano


def test_each_glimpse_is_what_the_model_says_of_it_alone():
    torch.manual_seed(0)
    model = spot.adapt(nano(), prior=Finder(8, longest=64, width=4, body=8).eval())
    images = torch.randn(2, 3, 70, 90)
    glimpses = model.policy.find(images, 3).glimpses
    several = Glimpsed(model, glimpses=3, tokens=9)
    alone = [model(images, glimpse_positions(images, glimpses[:, [number]], 9, 8)) for number in range(3)]
    torch.testing.assert_close(several.glimpse_logits(images, glimpses), torch.stack(alone, 1), atol=1e-5, rtol=1e-4)
    assert several(images).shape == (2, 5)
    with pytest.raises(InputError, match="3 glimpses have 9 tokens each, so 27 in all, got 9 positions"):
        several(images, several.positions(images, glimpses[:, :1]))


def test_the_glimpse_least_like_nothing_decides():
    model = spot.adapt(nano(), prior=Finder(8, about={"made": {"none": "empty"}}))
    model.class_names = ["empty", "cat", "dog", "cow", "hen"]
    several = Glimpsed(model)
    nothing, cat, dog = [5.0, 0, 0, 0, 0], [1.0, 3, 0, 0, 0], [1.0, 0, 7, 0, 0]
    assert several.picture_logits(torch.tensor([[nothing, cat, dog], [nothing, cat, nothing], [nothing] * 3])).argmax(
        1
    ).tolist() == [2, 1, 0]


def test_a_model_without_a_finder_gets_a_sentence():
    with pytest.raises(InputError, match="has no finder"):
        Glimpsed(spot.adapt(nano()))


@pytest.fixture
def taught(tmp_path):
    """A folder as spot learn --look glimpses writes it, and pictures of two sizes in two class folders."""
    about = {"model": "nano", "made": {"glimpses": 2, "none": "empty"}}
    finder = Finder(8, longest=64, width=4, body=8, about=about).eval()
    model = spot.adapt("vit_tiny_patch16_224", tokens=9, prior=finder, **NANO)
    model.class_names = ["cat", "empty", "dog", "cow", "hen"]
    model.save_pretrained(tmp_path / "model")
    draw = np.random.default_rng(0)
    for number, (kind, size) in enumerate([("cat", (70, 90)), ("dog", (60, 100)), ("dog", (70, 90))]):
        (tmp_path / "val" / kind).mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(256, size=(*size, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "val" / kind / f"{number}.png")
    return tmp_path


def test_evaluate_reads_all_pixels_of_pictures_of_any_size(taught):
    model = spot.load(taught / "model").eval()
    made = compare(model, taught, glimpses=(1, 2), workers=0)
    assert [(row["placement"], row["tokens"]) for row in made.rows] == [("glimpses: 1", 9), ("glimpses: 2", 18)]
    assert made.rows[1]["gmacs"] > made.rows[0]["gmacs"]
    expected = []
    for key in made.evaluation.keys:
        pixels = torch.from_numpy(np.array(open_image(taught / key))).permute(2, 0, 1).float() / 255
        pixels = (pixels - 0.5) / 0.5  # the ViT's own mean and std
        found = model.policy.find(pixels[None], 2).glimpses
        alone = [
            model(pixels[None], glimpse_positions(pixels[None], found[:, [n]], 9, 8)).log_softmax(1) for n in (0, 1)
        ]
        expected.append(int(torch.maximum(*(each - each[:, [1]] for each in alone)).argmax()))
    assert made.evaluation.predictions[1].tolist() == expected
    own = compare(model, taught, workers=0)  # as many places as it was trained for
    assert [row["placement"] for row in own.rows] == ["glimpses: 2"]
    assert own.evaluation.predictions[0].tolist() == expected


def test_predict_shows_the_places(taught, capsys):
    file = str(taught / "val" / "cat" / "0.png")
    main(["predict", file, "--model", str(taught / "model"), "--out", str(taught / "seen.png")])
    assert "cat" in capsys.readouterr().out and (taught / "seen.png").is_file()
    with pytest.raises(SystemExit) as stop:
        main(["predict", file, "--model", "scenes-a", "--glimpses", "2", "--out", str(taught / "not.png")])
    assert stop.value.code == 2 and "has no finder" in capsys.readouterr().err
