"""The built-in data set as training data, with the recipes that made the built-in models."""

import pytest
import torch

from spot.errors import InputError
from spot.training.classifier import for_data
from spot.training.fresh import fresh
from spot.training.images import parts
from spot.training.loop import train
from spot.training.objectives import OBJECTIVES, Supervised
from spot.training.options import Options
from spot.training.recipes import SCENES, find_recipe, override
from spot.training.run import plan_of, run, settings_of, training_images
from spot.training.run_folder import RunFolder

SHAPE = {"img_size": 64, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 32}
SMALL = {"epochs": 2.0, "batch_size": 8, "warmup_epochs": 0.1}


def nano(**options):
    return fresh("vit_tiny_patch16_224", {**SHAPE, **options})


def options(out, **changes) -> Options:
    return Options(**{"data": "scenes", "out": out, "limit": 16, **changes})


@pytest.mark.parametrize("recipe", SCENES, ids=[recipe.name for recipe in SCENES])
def test_every_recipe_for_scenes_trains_to_its_end(recipe, tmp_path):
    model, small, asked = nano(), override(recipe, SMALL), options(tmp_path / "run", val="scenes", val_limit=8)
    if recipe.name == "scenes-finetune":
        model = for_data(model, small, asked)
    trained = run(model, small, asked)
    assert trained.num_classes == 32
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path):
    recipe = override(find_recipe("scenes-retrofit"), SMALL)

    def trained(name, *stops):
        for stop in stops:
            model, asked = nano(), options(tmp_path / name)
            images, _ = training_images(model, recipe, asked)
            folder = RunFolder(asked.out, settings_of(model, recipe, images, asked))
            plan = plan_of(images, recipe, model.data_config)
            model = train(OBJECTIVES[recipe.objective](model, recipe), plan, recipe, folder, stop_after=stop)
        return model.state_dict()

    whole, resumed = trained("whole", None), trained("resumed", 1, 3, None)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_budgets_and_priors_are_drawn_for_each_step():
    recipe = override(find_recipe("scenes-retrofit"), {"budgets": (4, 9), "priors": ("uniform", "isotropic")})
    objective, seen = Supervised(nano(), recipe), set()
    objective.model.register_forward_pre_hook(lambda _, given: seen.add(given[1].shape[1]))
    images, _ = training_images(objective.model, recipe, options("unused"))
    plan = plan_of(images, recipe, objective.model.data_config)
    for part in parts(plan, 8, range(12)):
        objective(part)
    assert seen == {4, 9}


@pytest.mark.parametrize(
    "recipe, changes, shape, sentence",
    [
        ("scenes", {}, {"num_classes": 10}, "scenes have 32 classes, the model 10"),
        ("scenes-distil", {"balance": 0.5}, {}, "balance=0"),
        ("scenes", {"img_size": 32}, {"img_size": 32}, "64 pixels"),
        ("scenes", {}, {"img_size": 32}, "the model \\(32, 32\\)"),
    ],
)
def test_what_does_not_fit_the_scenes_is_one_sentence(recipe, changes, shape, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        run(nano(**shape), override(find_recipe(recipe), changes), options(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
