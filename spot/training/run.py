"""A training run from start to end: model, images, recipe and folder put together.

The three verbs (retrofit, pretrain, finetune) differ only in which recipes they take.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot import report
from spot.data.images import Images, class_folders, data_for, loader, open_data
from spot.data.picture import evaluation_transform
from spot.data.scenes import Scenes
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate
from spot.models.checkpoints import load
from spot.models.spot_vit import SpotViT
from spot.processes import this_process
from spot.store import hash_model, read_state, write_state
from spot.training.images import SCENES_PER_EPOCH, Plan, ScenePlan, check_division, parts
from spot.training.loop import accelerated, check_precision, one_step, peak_memory, prepare, steps_in, train
from spot.training.objectives import OBJECTIVES
from spot.training.optim import build_optimizer, parameter_groups
from spot.training.options import Options
from spot.training.recipes import Distil, Recipe, Supervised, as_dict, decisive
from spot.training.run_folder import RunFolder

BUDGETS = (25, 49, 100)  # validated during training, isotropic, beside the grid


def run(model: SpotViT, recipe: Recipe, options: Options) -> SpotViT:
    """Train a model by a recipe into a folder, or go on with the run that is there."""
    check_precision(recipe)
    images, classes = training_images(model, recipe, options)
    teacher = None if options.teacher is None else load(options.teacher)
    folder = RunFolder(options.out, settings_of(model, recipe, images, options, teacher))
    this_process().wait_for_everyone()  # all have seen the folder before one writes to it
    objective = OBJECTIVES[recipe.objective](model, recipe, *([] if teacher is None else [teacher]))
    validate = None
    if options.val is not None and recipe.objective != "mae":
        validate = Validation(model, options.val, options.val_limit, classes, options.workers)
    with folder.held():
        weights = sampling_weights(teacher or model, recipe, images, folder, options.workers)
        return train(
            objective,
            plan_of(images, recipe, model.data_config, weights),
            recipe,
            folder,
            accumulate=options.accumulate,
            workers=options.workers,
            validate=validate,
            checkpoint_minutes=options.checkpoint_minutes,
            tracker=options.tracker,
        )


def training_images(model: SpotViT, recipe: Recipe, options: Options) -> tuple[Images | Scenes, Sequence[str] | int]:
    """The images, with the model's own class numbers where the recipe needs labels."""
    if options.teacher is not None and not isinstance(recipe, Distil):
        raise InputError(f"recipe {recipe.name} has no teacher; --teacher goes with --recipe distil")
    classes = class_folders(model)
    if options.data == "scenes" and not Path("scenes").is_dir():
        refuse_other_size(model, recipe)
        return training_scenes(model, recipe, options.limit), classes
    data = open_data(
        options.data,
        transform=evaluation_transform(model.data_config),
        split=options.split,
        classes=classes if isinstance(recipe, Supervised) else None,
        limit=options.limit,
    )
    if not isinstance(data, Images):
        raise InputError(f"{options.data} is a stream, which training cannot shuffle; use a folder")
    label = data.source[data.order[0]][1]
    if isinstance(recipe, Supervised) and (label is None or label < 0):
        raise InputError(
            f"recipe {recipe.name} needs labels, one folder per class, but {options.data} has none; "
            "for retrofitting without labels use --recipe distil"
        )
    refuse_other_size(model, recipe)
    return data, classes


def refuse_other_size(model: SpotViT, recipe: Recipe) -> None:
    """Refuse a recipe for images of another size than the model's."""
    if recipe.img_size != model.img_size[0]:
        raise InputError(
            f"recipe {recipe.name} wants images of {recipe.img_size} pixels, the model {model.img_size}; "
            "use --set img_size=…"
        )


def training_scenes(model: SpotViT, recipe: Recipe, limit: int | None) -> Scenes:
    """The built-in data set, if model and recipe are for it."""
    scenes = Scenes("train", limit or SCENES_PER_EPOCH, seed=recipe.seed)
    if recipe.img_size != scenes.difficulty.image_size:
        raise InputError(
            f"scenes have {scenes.difficulty.image_size} pixels a side, recipe {recipe.name} "
            f"wants {recipe.img_size}; --recipe scenes, scenes-retrofit and so on are for them"
        )
    if isinstance(recipe, Supervised) and model.num_classes != len(scenes.classes):
        raise InputError(f"scenes have {len(scenes.classes)} classes, the model {model.num_classes}; use spot finetune")
    if isinstance(recipe, Distil) and recipe.balance:
        raise InputError("scenes are never shown twice, so none can be drawn more often; use --set balance=0")
    return scenes


def plan_of(
    images: Images | Scenes, recipe: Recipe, data_config: dict[str, Any], weights: Tensor | None = None
) -> Plan:
    """Which image comes when."""
    if isinstance(images, Scenes):
        return ScenePlan(images, data_config)
    return Plan(images, recipe, data_config, weights)


def settings_of(
    model: SpotViT, recipe: Recipe, images: Images | Scenes, options: Options, teacher: SpotViT | None = None
) -> dict[str, Any]:
    """What decides the outcome of a run; a folder is only ever continued under the same."""
    keys = hashlib.sha256("\n".join(images.keys).encode()).hexdigest()[:16]
    if isinstance(images, Scenes):
        keys = repr(images.difficulty)
    others = {} if teacher is None else {"teacher": {"name": teacher.name, "weights": hash_model(teacher)}}
    return {
        "recipe": decisive(recipe),
        "model": {"name": model.name, "weights": hash_model(model)},
        "images": {"count": len(images), "keys": keys},
        "accumulate": options.accumulate,
        **others,
    }


def sampling_weights(
    model: SpotViT, recipe: Recipe, images: Images | Scenes, folder: RunFolder, workers: int
) -> Tensor | None:
    """How often to draw each image, so that what the teacher sees rarely is not forgotten; None: alike.

    Labels are not used: an image's class is what the model itself says of it, on its grid.
    """
    if isinstance(images, Scenes) or not isinstance(recipe, Distil) or not recipe.balance or not model.num_classes:
        return None
    file, state = folder.path / "predictions.pt", this_process()
    with state.main_process_first():
        if file.is_file():
            predictions = read_state(file)
        else:
            predictions = predict(model, images, workers, shown=state.is_main_process)
            if state.is_main_process:
                folder.begin()
                write_state(file, predictions)
    counts = torch.bincount(predictions, minlength=model.num_classes)[predictions]
    return counts.double() ** -recipe.balance


@torch.inference_mode()
def predict(model: SpotViT, images: Images, workers: int, *, shown: bool) -> Tensor:
    """The class of every image by the model on its grid: (M,)."""
    found = []
    batches = loader(images, 64, workers)
    device = next(model.parameters()).device
    for batch in report.track(batches, "what the teacher sees", len(batches), shown=shown):
        pixels = batch.images.to(device)
        found.append(model(pixels, model.grid(pixels)).argmax(1).cpu())
    if images.skipped:
        raise InputError(f"{images.skipped[0]} cannot be read; take it out of the training images")
    return torch.cat(found)


class Validation:
    """Accuracy on the grid and at a few budgets: model → {"val_grid": 75.5, …}."""

    def __init__(
        self, model: SpotViT, data: str, limit: int | None, classes: Sequence[str] | int, workers: int
    ) -> None:
        self.data = data_for(model, data, classes=classes, limit=limit)
        self.workers = workers

    def __call__(self, model: SpotViT) -> Mapping[str, float]:
        grid = len(model.grid())
        settings = [Setting("isotropic", tokens) for tokens in BUDGETS if tokens < grid] + [Setting("isotropic", grid)]
        state = this_process()
        batches = loader(self.data, 64, self.workers, process=state.process_index, processes=state.num_processes)
        found = evaluate(model, batches, settings, shown=False)
        return {f"val_{row['tokens']}": row["top1"] for row in found.rows()}


def dry_run(model: SpotViT, recipe: Recipe, options: Options, *, steps: int = 2) -> dict[str, Any]:
    """What a run would do, after timing a few of its passes; nothing is written."""
    images, _ = training_images(model, recipe, options)
    folder = RunFolder(options.out, settings_of(model, recipe, images, options))
    plan = plan_of(images, recipe, model.data_config)
    objective = OBJECTIVES[recipe.objective](model, recipe)
    accelerator = accelerated(recipe, options.accumulate, None, folder)
    check_division(recipe.batch_size, options.accumulate, accelerator.num_processes)
    prepare(objective, recipe)
    groups = parameter_groups(objective, recipe)
    parameters = dict(objective.named_parameters())
    optimizer = build_optimizer(objective, recipe)
    wrapped, optimizer = accelerator.prepare(objective, optimizer)
    objective.train()
    passes = parts(
        plan,
        recipe.batch_size,
        range(steps + 1),
        accumulate=options.accumulate,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
        workers=options.workers,
    )
    # One pass each, not whole steps: an accumulated step may take minutes. The first warms up.
    seconds = []
    for _ in range(steps + 1):
        began = time.monotonic()
        one_step(accelerator, wrapped, optimizer, passes, recipe, 1)
        seconds.append(time.monotonic() - began)
    total = steps_in(recipe, len(plan))
    each = options.accumulate * min(seconds[1:])
    return {
        "recipe": as_dict(recipe),
        "groups": [
            {
                "rate": recipe.lr * group.scale,
                "scale": group.scale,
                "weight_decay": group.weight_decay,
                "tensors": len(group.names),
                "parameters": sum(parameters[name].numel() for name in group.names),
                "first": group.names[0],
            }
            for group in groups
        ],
        "images": len(plan),
        "steps": total,
        "seconds_per_step": each,
        "hours": each * total / 3600,
        "memory_gb": peak_memory() / 1e9,
    }
