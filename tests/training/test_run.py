"""What a run reads: images that are left out, how often each image is drawn, and the built-in scenes."""

import csv
from pathlib import Path

import pytest
import torch

from spot.data.loader import loader
from spot.data.scenes import Scenes
from spot.errors import InputError
from spot.options import TrainOptions
from spot.training import run as module
from spot.training.new_weights import random_vit
from spot.training.recipes import find_recipe, override
from spot.training.run import run, sampling_weights, training_images
from spot.training.run_folder import RunFolder
from tests.conftest import make_nano
from tests.training.small_run import make_images, small_recipe


def test_images_that_a_file_names_are_never_trained_on(tmp_path):
    options = TrainOptions(data=str(make_images(tmp_path / "images")), out=tmp_path, leave_out=tmp_path / "aside.txt")

    def keys(*lines):
        options.leave_out.write_text("\n".join(lines))
        return list(training_images(make_nano(), small_recipe("distil"), options).keys)

    every = keys()
    assert keys(every[2], every[7]) == [key for key in every if key not in (every[2], every[7])]
    with pytest.raises(InputError, match=r"no image other/image\.jpg to leave out"):
        keys("other/image.jpg")


def test_the_list_of_images_set_aside_has_one_of_each_of_500_classes():
    names = (Path(__file__).parents[2] / "tools" / "set_aside.txt").read_text().split()
    assert len(names) == len({name.split("/")[0] for name in names}) == 500


def test_images_are_drawn_by_how_often_the_teacher_predicts_their_class(tmp_path, monkeypatch):
    data = make_images(tmp_path / "images", classes=5, each=2)
    model, recipe = make_nano(), small_recipe("distil", balance=0.5)
    images = training_images(model, recipe, TrainOptions(data=str(data), out=tmp_path / "run"))
    folder = RunFolder(tmp_path / "run", {"a": 1})
    weights = sampling_weights(model, recipe, images, folder, 0)
    classes = torch.cat([model(batch.images, model.grid(batch.images)).argmax(1) for batch in loader(images, 3)])
    expected = torch.tensor([1 / (classes == each).sum().sqrt() for each in classes], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6)
    monkeypatch.setattr(module, "evaluate", None)  # a resumed run reads what was predicted
    assert torch.equal(sampling_weights(model, recipe, images, folder, 0), weights)


NANO = {"img_size": 64, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 32}


def test_a_nano_learns_from_scenes(tmp_path):
    recipe = override(find_recipe("scenes"), {"epochs": 3.0, "batch_size": 16, "lr": 1e-2})
    run(random_vit("vit_tiny_patch16_224", NANO), recipe, TrainOptions(data="scenes", out=tmp_path, limit=256))
    losses = [float(row["loss"]) for row in csv.DictReader((tmp_path / "log.csv").open())]
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.parametrize(
    "recipe, changes, shape, sentence",
    [
        ("scenes", {}, {"num_classes": 10}, "scenes have 32 classes, the model 10"),
        ("distil", {"img_size": 64}, {}, "balance=0"),
        ("scenes", {"img_size": 32}, {"img_size": 32}, "scenes have 64 pixels a side, recipe scenes wants 32"),
        ("scenes", {}, {"img_size": 32}, r"the model \(32, 32\)"),
    ],
)
def test_what_does_not_fit_the_scenes_is_one_sentence(recipe, changes, shape, sentence, tmp_path):
    model = random_vit("vit_tiny_patch16_224", {**NANO, **shape})
    with pytest.raises(InputError, match=sentence):
        training_images(model, override(find_recipe(recipe), changes), TrainOptions(data="scenes", out=tmp_path))


def test_a_rotary_vit_trains_on_crops_of_its_images(tmp_path):
    """Its positions are relative, so that it takes a crop for a part of the picture."""
    model = random_vit("vit_small_patch16_rope_224", {**NANO, "init_values": 1.0, "img_size": 192})
    recipe = override(find_recipe("scenes"), {"img_size": 192})
    images = training_images(model, recipe, TrainOptions(data="needle:64", out=tmp_path))
    assert isinstance(images, Scenes) and images.difficulty.image_size == 64
