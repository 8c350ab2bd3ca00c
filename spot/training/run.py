"""One training run: model, images, recipe and output folder.

The verbs retrofit, pretrain and finetune call `begin`, and differ only in the recipes that they accept. In Python call
`run`.
"""

import hashlib
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spot import report
from spot.data.classes import class_folders
from spot.data.difficulty import difficulty_of
from spot.data.images import Images, data_for, listed, open_data
from spot.data.loader import loader
from spot.data.scenes import Scenes
from spot.errors import InputError, unknown
from spot.evaluation.accuracy import Setting, evaluate
from spot.hashes import hash_model, hash_tensors
from spot.models.checkpoints import read_state as read_weights
from spot.models.family import Family, full_retrofit
from spot.models.loading import load_source
from spot.models.mae import has_decoder
from spot.models.spot_vit import SpotViT
from spot.options import TrainOptions
from spot.processes import this_process
from spot.store import read_state, write_state
from spot.training.batches import SCENES_PER_EPOCH, Plan, ScenePlan, parts
from spot.training.fresh import for_data, fresh, read_options
from spot.training.loop import Trainer, steps_in
from spot.training.objectives import OBJECTIVES, Objective
from spot.training.optim import parameter_groups
from spot.training.recipes import (
    RECIPES,
    DistilRecipe,
    MaskedRecipe,
    Recipe,
    SupervisedRecipe,
    as_dict,
    find_recipe,
    override,
    pairs,
)
from spot.training.run_folder import RunFolder

BUDGETS = (25, 49, 100)  # validated during training with isotropic tokens, in addition to the grid


def begin(
    name: str,
    recipe_name: str,
    objectives: Sequence[str],
    options: TrainOptions,
    *,
    new_head: bool = False,
    classes: int | None = None,
) -> None:
    """Load a model by name and train it, or with `options.dry_run` only print the plan.

    objectives: the objectives of recipes that the verb accepts.
    new_head: replace the head with one for the data's classes, or for `classes` classes.
    """
    recipe = find_recipe(recipe_name)
    if recipe.objective not in objectives:
        fitting = [other for other, each in RECIPES.items() if each.objective in objectives]
        hint = f"{recipe_name} is a {recipe.objective} recipe"
        raise unknown("recipe for this verb", recipe_name, fitting, hint=hint)
    recipe = override(recipe, pairs(options.set, "a change of the recipe is FIELD=VALUE"))
    report.check_outputs(folder=options.out)
    teacher = None
    if options.fresh is None:
        source = load_source(name, weights=options.weights)
        if isinstance(source, Family) and isinstance(recipe, DistilRecipe):
            teacher = source.model(source.cells)
        model = full_retrofit(source)
    else:
        model = fresh(name, read_options(options.fresh), recipe.seed)
    if new_head:
        model = for_data(model, recipe, options, classes)
    if options.dry_run:
        dry_run(model, recipe, options)
        return
    run(model, recipe, options, teacher)
    if this_process().is_main_process:
        report.say(f"The trained model is in {options.out / 'model'}")


def run(
    model: SpotViT,
    recipe: Recipe,
    options: TrainOptions,
    teacher: SpotViT | None = None,
    objective: Callable[..., Objective] | None = None,
) -> SpotViT:
    """Train a model with a recipe, or resume the run in `options.out`.

    teacher: for distillation, the ViT that the model was retrofitted from. Default: the model before training.
    objective: builds the objective. Default: the recipe's own.
    """
    images = training_images(model, recipe, options)
    steps_in(recipe, len(images))  # refuses a batch or a warm-up that does not fit, before anything is written
    decoder = decoder_of(model, recipe, options)
    folder = RunFolder(options.out, settings_of(model, recipe, images, options, teacher, decoder))
    this_process().wait_for_everyone()  # all processes check the folder before one writes to it
    extra = [each for each in (teacher, decoder) if each is not None]  # at most one, depending on the recipe
    goal = (objective or OBJECTIVES[recipe.objective])(model, recipe, *extra)
    validated = options.val is not None and recipe.objective != "mae"
    validate = Validation(model, str(options.val), options.val_limit, options.workers) if validated else None
    with folder.held():
        weights = sampling_weights(teacher or model, recipe, images, folder, options.workers)
        plan = plan_of(images, recipe, model.data_config, weights)
        return Trainer(goal, plan, recipe, options, folder).train(validate)


def decoder_of(model: SpotViT, recipe: Recipe, options: TrainOptions) -> dict[str, Tensor] | None:
    """The weights of a masked autoencoder's checkpoint with a decoder, else None and a message to the user."""
    if not isinstance(recipe, MaskedRecipe):
        return None
    state = {} if options.weights is None else read_weights(options.weights)
    if has_decoder(state):
        return state
    if options.fresh is None and this_process().is_main_process:
        where = model.name if options.weights is None else options.weights
        report.say(
            f"{where} has no decoder, so training starts with a new one. The paper retrofits both: for that give "
            "the full checkpoint, such as mae_pretrain_vit_base_full.pth, as --weights."
        )
    return None


def training_images(model: SpotViT, recipe: Recipe, options: TrainOptions) -> Images | Scenes:
    """Open the training images, with the model's class indices if the recipe needs labels. Refuses unsuitable data."""
    if recipe.precision == "fp16" and this_process().device.type == "cpu":  # accelerate would use float32
        raise InputError("precision=fp16 needs an accelerator; on a CPU use precision=bf16 or no")
    supervised = isinstance(recipe, SupervisedRecipe)
    difficulty = difficulty_of(options.data)
    if difficulty is not None:
        images: Any = Scenes("train", options.limit or SCENES_PER_EPOCH, difficulty=difficulty, seed=recipe.seed)
        size, count = images.difficulty.image_size, len(images.classes)
        if recipe.img_size != size and model.vit.pos_embed is not None:  # rotary ViTs have no fixed size
            raise InputError(
                f"scenes have {size} pixels a side, recipe {recipe.name} wants {recipe.img_size}; "
                "--recipe scenes, scenes-retrofit and so on are for them"
            )
        if supervised and model.num_classes != count:
            raise InputError(f"scenes have {count} classes, the model {model.num_classes}; use spot finetune")
        if isinstance(recipe, DistilRecipe) and recipe.balance:
            raise InputError("scenes are never shown twice, so none can be drawn more often; use --set balance=0")
    else:
        images = open_data(
            options.data,
            transform=model.transform(),
            split=options.split,
            classes=class_folders(model) if supervised else None,
            limit=None if options.leave_out else options.limit,
        )
        if options.leave_out is not None:
            images.without(listed(options.leave_out))
            images.thin(options.limit or len(images))
        label = images.source[images.order[0]][1]
        if supervised and (label is None or label < 0):
            raise InputError(
                f"recipe {recipe.name} needs labels, one folder per class, but {options.data} has none; "
                "for retrofitting without labels use --recipe distil"
            )
    if recipe.img_size != model.img_size[0]:
        raise InputError(
            f"recipe {recipe.name} wants images of {recipe.img_size} pixels, the model {model.img_size}; "
            "use --set img_size=…"
        )
    return images


def plan_of(images: Images | Scenes, recipe: Recipe, config: dict[str, Any], weights: Tensor | None = None) -> Plan:
    """The stream of training images."""
    return ScenePlan(images, config) if isinstance(images, Scenes) else Plan(images, recipe, config, weights)


def settings_of(
    model: SpotViT,
    recipe: Recipe,
    images: Images | Scenes,
    options: TrainOptions,
    teacher: SpotViT | None = None,
    decoder: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """The settings that determine a run's outcome. A run resumes only with the same settings."""
    keys = hashlib.sha256("\n".join(images.keys).encode(errors="surrogateescape")).hexdigest()[:16]
    if isinstance(images, Scenes):
        keys = repr(images.difficulty)
    models = {"model": model} if teacher is None else {"model": model, "teacher": teacher}
    return {
        "recipe": as_dict(recipe),
        **{role: {"name": each.name, "weights": hash_model(each)} for role, each in models.items()},
        **({} if decoder is None else {"decoder": {"weights": hash_tensors(decoder)}}),
        "images": {"count": len(images), "keys": keys},
        "accumulate": options.accumulate,
    }


def sampling_weights(
    teacher: SpotViT, recipe: Recipe, images: Images | Scenes, folder: RunFolder, workers: int
) -> Tensor | None:
    """Sampling weights of the images, higher for classes that the teacher rarely predicts. None: uniform.

    Labels are not used. An image's class is the dense teacher's prediction.
    """
    if isinstance(images, Scenes) or not isinstance(recipe, DistilRecipe):
        return None
    if not recipe.balance or not teacher.num_classes:
        return None
    file, state = folder.path / "predictions.pt", this_process()
    if state.is_main_process:
        folder.begin()
    there = file.is_file()
    state.wait_for_everyone()  # all processes check before one writes
    if there:
        predictions = read_state(file, "the teacher's predictions")["classes"]
    else:
        batches = loader(images, 64, workers, process=state.process_index, processes=state.num_processes)
        grid = [Setting("isotropic", len(teacher.grid()))]
        made = evaluate(teacher.to(state.device), batches, grid, accuracy=False, title="the teacher's predictions")
        rows = {key: row for row, key in enumerate(made.keys)}
        predictions = made.predictions[0, [rows[key] for key in images.keys]]
        if state.is_main_process:
            write_state(file, {"classes": predictions})
    counts = torch.bincount(predictions)[predictions]
    return counts.double() ** -recipe.balance


class Validation:
    """Accuracy on the grid and at a few budgets: model → {"val_64": 75.5, …}."""

    def __init__(self, model: SpotViT, data: str, limit: int | None = None, workers: int = 0) -> None:
        self.data, self.workers = data_for(model, data, limit=limit), workers

    def __call__(self, model: SpotViT) -> Mapping[str, float]:
        grid, state = len(model.grid()), this_process()
        settings = [Setting("isotropic", tokens) for tokens in (*BUDGETS, grid) if tokens <= grid]
        batches = loader(self.data, 64, self.workers, process=state.process_index, processes=state.num_processes)
        rows = evaluate(model, batches, settings, shown=False).rows()
        return {f"val_{row['tokens']}": row["top1"] for row in rows}


def dry_run(model: SpotViT, recipe: Recipe, options: TrainOptions) -> None:
    """Print the recipe, parameter groups, steps, time and memory of a run, measured over three backward passes."""
    images = training_images(model, recipe, options)
    decoder = decoder_of(model, recipe, options)
    folder = RunFolder(options.out, settings_of(model, recipe, images, options, decoder=decoder))
    objective = OBJECTIVES[recipe.objective](model, recipe, *([] if decoder is None else [decoder]))
    trainer = Trainer(objective, plan_of(images, recipe, model.data_config), recipe, options, folder)
    objective.train()
    stream, seconds = parts(trainer.plan, trainer.share(range(3)), options.workers), []
    for _ in range(3):  # passes, not steps: an accumulated step may take minutes
        began = time.monotonic()
        trainer.backward(stream)
        seconds.append(time.monotonic() - began)
    each = options.accumulate * min(seconds[1:])  # the first is slower
    groups = [
        {
            "rate": f"{group['lr']:.2e}",
            "scale": group["scale"],
            "weight_decay": group["weight_decay"],
            "tensors": len(group["names"]),
            "parameters": sum(parameter.numel() for parameter in group["params"]),
            "first": group["names"][0],
        }
        for group in parameter_groups(objective, recipe)
    ]
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated()
    else:  # the peak of this process
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if not this_process().is_main_process:
        return
    values = [{"field": key, "value": str(value)} for key, value in as_dict(recipe).items()]
    report.show(values, f"recipe {recipe.name}: {recipe.origin}")
    report.show(groups, "parameter groups", digits=4)
    report.say(
        f"{trainer.total} steps over {len(images)} images, {each:.2f} s each: {each * trainer.total / 3600:.2f} hours; "
        f"{memory / 1e9:.2f} GB"
    )
