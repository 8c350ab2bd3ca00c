"""The built-in data set as training data, with its recipes."""

import csv

import pytest

from spot.errors import InputError
from spot.options import TrainOptions
from spot.training.new_weights import random_vit
from spot.training.recipes import find_recipe, override
from spot.training.run import run, training_images

SHAPE = {"img_size": 64, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 32}


def nano(**options):
    return random_vit("vit_tiny_patch16_224", {**SHAPE, **options})


def rotary(**options):
    return random_vit("vit_small_patch16_rope_224", {**SHAPE, "init_values": 1.0, **options})


def options(out, **changes) -> TrainOptions:
    return TrainOptions(**{"data": "scenes", "out": out, "limit": 16, **changes})


@pytest.mark.parametrize("name", ["scenes", "scenes-retrofit"])
def test_every_recipe_for_scenes_trains_to_its_end_and_its_loss_falls(name, tmp_path):
    recipe = override(find_recipe(name), {"epochs": 3.0, "batch_size": 16, "warmup_epochs": 0.1, "lr": 1e-2})
    asked = options(tmp_path / "run", limit=256, val="scenes", val_limit=8)
    assert run(nano(), recipe, asked).num_classes == 32
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    losses = [float(row["loss"]) for row in csv.DictReader((tmp_path / "run" / "log.csv").open())]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_a_rotary_vit_trains_on_crops_of_its_images(tmp_path):
    """Its positions are relative, so that it takes a crop for a part of the picture."""
    recipe = override(find_recipe("scenes"), {"img_size": 192})
    crops = options(tmp_path, data="needle:64")
    assert training_images(rotary(img_size=192), recipe, crops).difficulty.image_size == 64
    with pytest.raises(InputError, match="scenes have 64 pixels a side, recipe scenes wants 192"):
        training_images(nano(img_size=192), recipe, crops)


@pytest.mark.parametrize(
    "recipe, changes, shape, sentence",
    [
        ("scenes", {}, {"num_classes": 10}, "scenes have 32 classes, the model 10"),
        ("distil", {"img_size": 64, "batch_size": 8}, {}, "balance=0"),
        ("scenes", {"img_size": 32}, {"img_size": 32}, "64 pixels"),
        ("scenes", {}, {"img_size": 32}, "the model \\(32, 32\\)"),
    ],
)
def test_what_does_not_fit_the_scenes_is_one_sentence(recipe, changes, shape, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        run(nano(**shape), override(find_recipe(recipe), changes), options(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
