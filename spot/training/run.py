"""A training run from start to end: model, images, recipe and folder put together.

`begin` is what the verbs retrofit, pretrain and finetune call, which differ only in the recipes they take;
`run` trains a model that is there, in Python.
"""

import copy
import hashlib
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
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
from spot.models.family import Family, dense_model, full_retrofit
from spot.models.loading import load_source
from spot.models.mae import has_decoder
from spot.models.spot_vit import SpotViT
from spot.options import TrainOptions
from spot.placement.oracle import frozen
from spot.processes import this_process
from spot.store import read_state, write_state
from spot.training.batches import SCENES_PER_EPOCH, Plan, ScenePlan, Targets, ViewPlan, parts, views_folder
from spot.training.fresh import for_data, fresh, read_options
from spot.training.loop import Trainer, steps_in
from spot.training.objectives import OBJECTIVES, Distil, Objective
from spot.training.optim import parameter_groups
from spot.training.recipes import (
    DESCRIPTIVE,
    RECIPES,
    DistilRecipe,
    MaskedRecipe,
    Recipe,
    SupervisedRecipe,
    as_dict,
    decisive,
    find_recipe,
    override,
    pairs,
)
from spot.training.run_folder import RunFolder

CHUNK = 4096  # images in a file of the teacher's predictions: what processes share out, and a kill can lose
BUDGETS = (25, 49, 100)  # validated during training, isotropic, beside the grid


def begin(
    name: str,
    recipe_name: str,
    objectives: Sequence[str],
    options: TrainOptions,
    *,
    new_head: bool = False,
    classes: int | None = None,
) -> None:
    """Train the model of a name, or with `options.dry_run` show what would be done.

    objectives: those of the recipes that the verb takes.
    new_head: for the data's classes, or as many as `classes` says.
    """
    recipe = find_recipe(recipe_name)
    if recipe.objective not in objectives:
        fitting = [other for other, each in RECIPES.items() if each.objective in objectives]
        raise unknown(
            "recipe for this verb", recipe_name, fitting, hint=f"{recipe_name} is a {recipe.objective} recipe"
        )
    recipe = override(recipe, pairs(options.set, "a change of the recipe is FIELD=VALUE"))
    report.check_outputs(options.json, folder=options.out)
    base = None
    if options.fresh is None:
        source = load_source(name, weights=options.weights)
        base = source.model(source.cells) if isinstance(source, Family) and isinstance(recipe, DistilRecipe) else None
        model = full_retrofit(source)
    else:
        model = fresh(name, read_options(options.fresh), recipe.seed)
    if new_head:
        model = for_data(model, recipe, options, classes)
    if not options.dry_run:
        run(model, recipe, options, base)
        if this_process().is_main_process:
            report.say(f"The trained model is in {options.out / 'model'}")
        return
    plan = dry_run(model, recipe, options)
    if this_process().is_main_process:
        show_plan(plan)
        report.save_json(options.json, plan.pop("groups"), plan)


def run(
    model: SpotViT,
    recipe: Recipe,
    options: TrainOptions,
    base: SpotViT | None = None,
    objective: Callable[..., Objective] | None = None,
) -> SpotViT:
    """Train a model by a recipe into a folder, or resume the run that is there.

    base: the ViT that the model was retrofitted from: the teacher, unless the options name another.
    objective: makes the objective, instead of the recipe's own.
    """
    images = training_images(model, recipe, options)
    steps_in(recipe, len(images))  # refuses a batch or a warm-up that does not fit, before anything is written
    teacher = base if options.teacher is None else dense_model(load_source(options.teacher))
    decoder = decoder_of(model, recipe, options)
    folder = RunFolder(options.out, settings_of(model, recipe, images, options, teacher, decoder))
    this_process().wait_for_everyone()  # all have seen the folder before one writes to it
    make = objective or OBJECTIVES[recipe.objective]
    begun = [each for each in (teacher, decoder) if each is not None]  # by a recipe's kind there is one of them at most
    goal = make(model, recipe, *begun)
    validated = options.val is not None and recipe.objective != "mae"
    validate = Validation(model, str(options.val), options.val_limit, options.workers) if validated else None
    with folder.held():
        weights = sampling_weights(teacher or model, recipe, images, folder, options.workers)
        plan = plan_of(images, recipe, model.data_config, weights)
        cache = options.cache or options.out / "views"
        if isinstance(recipe, DistilRecipe) and recipe.views and isinstance(images, Images):
            kept = views_folder(cache, hash_model(teacher or model), folder.settings["images"], recipe)
            plan = ViewPlan(images, recipe, model.data_config, weights, kept)
            cast(Distil, goal).targets = Targets(kept, len(images) * recipe.views)
        trained = Trainer(goal, plan, recipe, options, folder).train(validate)
        if options.cache is None and this_process().is_main_process:
            shutil.rmtree(cache, ignore_errors=True)
        return trained


def decoder_of(model: SpotViT, recipe: Recipe, options: TrainOptions) -> dict[str, Tensor] | None:
    """The weights of a masked autoencoder's file, if its decoder is in it; if not, this says that a new one begins."""
    if not isinstance(recipe, MaskedRecipe):
        return None
    state = {} if options.weights is None else read_weights(options.weights)
    if has_decoder(state):
        return state
    if options.fresh is None and this_process().is_main_process:
        where = model.name if options.weights is None else options.weights
        report.say(
            f"{where} has no decoder, so a new one learns beside the encoder. The paper retrofits both: for that give "
            "the full checkpoint, such as mae_pretrain_vit_base_full.pth, as --weights."
        )
    return None


def training_images(model: SpotViT, recipe: Recipe, options: TrainOptions) -> Images | Scenes:
    """The images, with the model's own class numbers where the recipe needs labels; refuses what does not fit."""
    if recipe.precision == "fp16" and this_process().device.type == "cpu":  # accelerate would use float32
        raise InputError("precision=fp16 needs an accelerator; on a CPU use precision=bf16 or no")
    if options.teacher is not None and not isinstance(recipe, DistilRecipe):
        raise InputError(f"recipe {recipe.name} has no teacher; --teacher goes with --recipe distil")
    supervised = isinstance(recipe, SupervisedRecipe)
    difficulty = difficulty_of(options.data)
    if difficulty is not None:
        images: Any = Scenes("train", options.limit or SCENES_PER_EPOCH, difficulty=difficulty, seed=recipe.seed)
        size, count = images.difficulty.image_size, len(images.classes)
        if recipe.img_size != size and model.vit.pos_embed is not None:  # rotary ViTs have no size of their own
            raise InputError(
                f"scenes have {size} pixels a side, recipe {recipe.name} wants {recipe.img_size}; "
                "--recipe scenes, scenes-retrofit and so on are for them"
            )
        if supervised and model.num_classes != count:
            raise InputError(f"scenes have {count} classes, the model {model.num_classes}; use spot finetune")
        if isinstance(recipe, DistilRecipe) and recipe.balance:
            raise InputError("scenes are never shown twice, so none can be drawn more often; use --set balance=0")
        if isinstance(recipe, DistilRecipe) and recipe.views:
            raise InputError("scenes are never shown twice, so they have no fixed views; use --set views=0")
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
    """Which image comes when."""
    return ScenePlan(images, config) if isinstance(images, Scenes) else Plan(images, recipe, config, weights)


def settings_of(
    model: SpotViT,
    recipe: Recipe,
    images: Images | Scenes,
    options: TrainOptions,
    teacher: SpotViT | None = None,
    decoder: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """What decides the outcome of a run; a folder is only ever continued under the same."""
    keys = hashlib.sha256("\n".join(images.keys).encode(errors="surrogateescape")).hexdigest()[:16]
    if isinstance(images, Scenes):
        keys = repr(images.difficulty)
    models = {"model": model} if teacher is None else {"model": model, "teacher": teacher}
    return {
        "recipe": decisive(recipe),
        **{role: {"name": each.name, "weights": hash_model(each)} for role, each in models.items()},
        **({} if decoder is None else {"decoder": {"weights": hash_tensors(decoder)}}),
        "images": {"count": len(images), "keys": keys},
        "accumulate": options.accumulate,
    }


def sampling_weights(
    model: SpotViT, recipe: Recipe, images: Images | Scenes, folder: RunFolder, workers: int
) -> Tensor | None:
    """How often to draw each image, so that what the teacher sees rarely is not forgotten; None: alike.

    Labels are not used: an image's class is what the model itself says of it, on its grid.
    """
    balanced = isinstance(recipe, DistilRecipe) and recipe.balance and model.num_classes
    if isinstance(images, Scenes) or not balanced:
        return None
    file, state = folder.path / "predictions.pt", this_process()
    predictions: Any = read_state(file, "the teacher's predictions") if file.is_file() else None
    if state.is_main_process:
        folder.begin()
    state.wait_for_everyone()  # all have looked before one writes
    if not is_predictions(predictions, len(images), model.num_classes):
        pieces = folder.path / "predictions"
        predictions = predict(model.to(state.device), images, pieces, workers)
        if state.is_main_process:
            write_state(file, predictions)
            shutil.rmtree(pieces, ignore_errors=True)
    counts = torch.bincount(predictions, minlength=model.num_classes)[predictions]
    return counts.double() ** -cast(DistilRecipe, recipe).balance


def is_predictions(made: Any, count: int, classes: int) -> bool:
    """Whether this is the class of every image."""
    fits = isinstance(made, Tensor) and made.shape == (count,) and made.dtype == torch.int64
    return fits and 0 <= int(made.min()) <= int(made.max()) < classes


def predict(model: SpotViT, images: Images, folder: Path, workers: int) -> Tensor:
    """The class of every image by the model on its grid, (M,), predicted by all processes, each on its device.

    A file in the folder has the classes of CHUNK images in a row. Those that are there, of a run that was killed,
    however many processes it had, are not predicted again.
    """
    state = this_process()
    chunks = [range(first, min(first + CHUNK, len(images))) for first in range(0, len(images), CHUNK)]
    files = [folder / f"{number:06d}.pt" for number in range(len(chunks))]
    own = range(state.process_index, len(chunks), state.num_processes)
    problem = ""
    try:
        for number in report.track(own, "the teacher's predictions", len(own), shown=state.is_main_process):
            known: Any = read_state(files[number], "the teacher's predictions") if files[number].is_file() else None
            if not is_predictions(known, len(chunks[number]), model.num_classes):
                write_state(files[number], predict_part(model, images, chunks[number], workers))
    except InputError as error:
        problem = str(error)
    problems = [each for each in gather_object([problem]) if each]  # the others would wait for ever
    if problems:
        raise InputError(problems[0])
    predictions = torch.cat([read_state(file, "the teacher's predictions") for file in files])
    state.wait_for_everyone()  # all have read before one cleans up
    return predictions


def predict_part(model: SpotViT, images: Images, rows: Sequence[int], workers: int) -> Tensor:
    """The class of some of the images, by the model on its grid: (M,)."""
    part = copy.copy(images)
    part.keep(rows)
    part.skipped, predictions = [], []
    with frozen(model), torch.inference_mode():
        for batch in loader(part, 64, workers):
            pixels = batch.images.to(next(model.parameters()).device)
            predictions.append(model(pixels, model.grid(pixels)).argmax(1).cpu())
    if part.skipped:
        raise InputError(f"{part.skipped[0]} cannot be read; take it out of the training images")
    return torch.cat(predictions)


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


def dry_run(model: SpotViT, recipe: Recipe, options: TrainOptions, *, passes: int = 2) -> dict[str, Any]:
    """What a run would do, after timing a few of its backward passes; nothing is written."""
    images = training_images(model, recipe, options)
    decoder = decoder_of(model, recipe, options)
    folder = RunFolder(options.out, settings_of(model, recipe, images, options, decoder=decoder))
    objective = OBJECTIVES[recipe.objective](model, recipe, *([] if decoder is None else [decoder]))
    trainer = Trainer(objective, plan_of(images, recipe, model.data_config), recipe, options, folder)
    objective.train()
    stream = parts(trainer.plan, trainer.share(range(passes + 1)), options.workers)
    # Passes, not whole steps: an accumulated step may take minutes. The first warms up.
    seconds = []
    for _ in range(passes + 1):
        began = time.monotonic()
        trainer.backward(stream)
        seconds.append(time.monotonic() - began)
    each = options.accumulate * min(seconds[1:])
    groups = [
        {
            "rate": group["lr"],
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
    else:  # the most that this process held at once
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "recipe": as_dict(recipe),
        "groups": groups,
        "images": len(images),
        "steps": trainer.total,
        "seconds_per_step": each,
        "hours": each * trainer.total / 3600,
        "memory_gb": memory / 1e9,
    }


def show_plan(plan: dict[str, Any]) -> None:
    """The dry run as tables."""
    recipe = plan["recipe"]
    values = [{"field": key, "value": str(value)} for key, value in recipe.items() if key not in DESCRIPTIVE]
    report.show(values, f"recipe {recipe['name']}: {recipe['origin']}")
    rows = [{**group, "rate": f"{group['rate']:.2e}"} for group in plan["groups"]]
    report.show(rows, "parameter groups", digits=4)
    report.say(
        f"{plan['steps']} steps over {plan['images']} images, {plan['seconds_per_step']:.2f} s each: "
        f"{plan['hours']:.2f} hours; {plan['memory_gb']:.2f} GB"
    )
