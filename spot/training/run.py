"""One training run: `run(model, recipe, TrainOptions(data=…, out=…))`.

The verbs retrofit, pretrain and finetune (spot/commands/train.py) differ only in the recipes that they accept.
"""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from spot import report
from spot.data.classes import class_folders
from spot.data.difficulty import difficulty_of
from spot.data.images import Images, data_for, open_data
from spot.data.loader import loader
from spot.data.scenes import Scenes
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate
from spot.hashes import hash_json, hash_model, hash_tensors
from spot.models.spot_vit import SpotViT
from spot.options import TrainOptions
from spot.processes import this_process
from spot.store import read_state, write_state
from spot.training.batches import SCENES_PER_EPOCH, SceneStream, TrainingStream
from spot.training.loop import Trainer
from spot.training.objectives import OBJECTIVES, Objective
from spot.training.optim import parameter_groups
from spot.training.recipes import DistilRecipe, Recipe, SupervisedRecipe, as_dict
from spot.training.run_folder import RunFolder

BUDGETS = (25, 49, 100)  # validated during training with isotropic tokens, in addition to the grid


def run(
    model: SpotViT,
    recipe: Recipe,
    options: TrainOptions,
    teacher: SpotViT | None = None,
    *,
    decoder: Mapping[str, Tensor] | None = None,
    objective: Callable[..., Objective] | None = None,
    dry_run: bool = False,
) -> SpotViT:
    """Train a model with a recipe, or resume the run in `options.out`.

    teacher: for distillation, the ViT that the model was retrofitted from. Default: the model before training.
    decoder: for a masked autoencoder, a published checkpoint that contains its decoder. Default: a new decoder.
    objective: builds the objective. Default: the recipe's own.
    dry_run: print the plan and its cost; write nothing, and return the model untrained.
    """
    images = training_images(model, recipe, options)
    keys = repr(images.difficulty) if isinstance(images, Scenes) else hash_json(list(images.keys))
    settings = {  # all that determines the outcome; a run resumes only with the same settings
        "recipe": as_dict(recipe),
        "model": {"name": model.name, "weights": hash_model(model)},
        "images": {"count": len(images), "keys": keys},
        "accumulate": options.accumulate,
    }
    if teacher is not None:
        settings["teacher"] = {"name": teacher.name, "weights": hash_model(teacher)}
    if decoder is not None:
        settings["decoder"] = {"weights": hash_tensors(decoder)}
    folder = RunFolder(options.out, settings)
    this_process().wait_for_everyone()  # all processes check the folder before one writes to it
    given = [each for each in (teacher, decoder) if each is not None]  # at most one, depending on the recipe
    loss = (objective or OBJECTIVES[type(recipe)])(model, recipe, *given)
    config = model.data_config
    stream = SceneStream(images, config) if isinstance(images, Scenes) else TrainingStream(images, recipe, config)
    trainer = Trainer(loss, stream, recipe, options, folder)
    if dry_run:
        print_plan(trainer)
        return model
    validate = None
    if options.val is not None and recipe.objective != "mae":
        validate = Validation(model, str(options.val), options.val_limit, options.workers)
    with folder.held():
        if isinstance(recipe, DistilRecipe) and recipe.balance and isinstance(images, Images):
            stream.weights = sampling_weights(teacher or model, recipe, images, folder, options.workers)
        return trainer.train(validate)


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
                "use --recipe scenes or scenes-retrofit"
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
            limit=options.limit,
            leave_out=options.leave_out,
        )
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


def sampling_weights(
    teacher: SpotViT, recipe: DistilRecipe, images: Images, folder: RunFolder, workers: int
) -> Tensor | None:
    """Sampling weights of the images, higher for classes that the teacher rarely predicts. None: uniform.

    Labels are not used. An image's class is the dense teacher's prediction.
    """
    if not teacher.num_classes:
        return None
    file, process = folder.path / "predictions.pt", this_process()
    there = file.is_file()
    process.wait_for_everyone()  # all processes check before one writes
    if there:
        classes = read_state(file, "the teacher's predictions")["classes"]
    else:
        batches = loader(images, 64, workers, process=process.process_index, processes=process.num_processes)
        grid = [Setting("isotropic", len(teacher.grid()))]
        found = evaluate(teacher.to(process.device), batches, grid, accuracy=False, title="the teacher's predictions")
        rows = {key: row for row, key in enumerate(found.keys)}
        classes = found.predictions[0, [rows[key] for key in images.keys]]
        if process.is_main_process:
            write_state(file, {"classes": classes})
    counts = torch.bincount(classes)[classes]
    return counts.double() ** -recipe.balance


class Validation:
    """Accuracy on the grid and at a few budgets: model → {"val_64": 75.5, …}."""

    def __init__(self, model: SpotViT, data: str, limit: int | None = None, workers: int = 0) -> None:
        self.data, self.workers = data_for(model, data, limit=limit), workers

    def __call__(self, model: SpotViT) -> Mapping[str, float]:
        grid, process = len(model.grid()), this_process()
        settings = [Setting("isotropic", tokens) for tokens in (*BUDGETS, grid) if tokens <= grid]
        batches = loader(self.data, 64, self.workers, process=process.process_index, processes=process.num_processes)
        rows = evaluate(model, batches, settings, shown=False).rows()
        return {f"val_{row['tokens']}": row["top1"] for row in rows}


def print_plan(trainer: Trainer) -> None:
    """Print the recipe, parameter groups, steps, time and memory of a run, measured over three backward passes."""
    recipe, seconds, batches = trainer.recipe, [], trainer.batches(range(3))
    trainer.objective.train()
    for _ in range(3):  # passes, not steps: an accumulated step may take minutes
        began = time.monotonic()
        trainer.backward(batches)
        seconds.append(time.monotonic() - began)
    each = trainer.options.accumulate * min(seconds[1:])  # the first is slower
    groups = [
        {
            "rate": f"{group['lr']:.2e}",
            "scale": group["scale"],
            "weight_decay": group["weight_decay"],
            "tensors": len(group["names"]),
            "parameters": sum(parameter.numel() for parameter in group["params"]),
            "first tensor": group["names"][0],
        }
        for group in parameter_groups(trainer.objective, recipe)
    ]
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated()
    else:  # the peak of this process
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if not trainer.main:
        return
    values = [{"field": key, "value": str(value)} for key, value in as_dict(recipe).items()]
    report.show(values, f"recipe {recipe.name}: {recipe.origin}")
    report.show(groups, "parameter groups", digits=4)
    hours = each * trainer.total / 3600
    report.say(
        f"{len(trainer.stream)} images, {trainer.total} steps of about {each:.2f} s: {hours:.2f} hours, "
        f"{memory / 1e9:.2f} GB of memory"
    )
