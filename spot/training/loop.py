"""The training loop, one for every objective: accelerate carries it from one CPU to many nodes.

    objective = OBJECTIVES[recipe.objective](model, recipe)
    train(objective, Plan(images, recipe, model.data_config), recipe, RunFolder(out, settings))

What is restored after an interruption is the weights, the optimiser, the averaged weights and the
log. Everything random is a function of the seed and the step (spot.draws), so an
interrupted run ends with the weights of an uninterrupted one, bit for bit on a CPU.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from timm.layers import DropPath
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from spot import report
from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.plots import save as save_figure
from spot.plots.training import training_logs
from spot.processes import this_process
from spot.training.images import Part, Plan, check_division, parts
from spot.training.objectives import Objective
from spot.training.optim import build_optimizer, learning_rate, rate_scale, set_rate
from spot.training.recipes import Recipe
from spot.training.run_folder import RunFolder

Validate = Callable[[SpotViT], Mapping[str, float]]


@dataclass
class Progress:
    """Where training stands; kept in checkpoints."""

    step: int = 0  # optimiser steps done
    rows: list[dict[str, Any]] = field(default_factory=list)  # the log, one row per epoch
    loss: float = 0.0  # summed over the steps since the last row
    correct: float = 0.0
    images: int = 0
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0


def steps_in(recipe: Recipe, images: int) -> int:
    """Optimiser steps of a whole run over so many images."""
    return max(1, round(recipe.epochs * images / recipe.batch_size))


def train(
    objective: Objective,
    plan: Plan,
    recipe: Recipe,
    folder: RunFolder,
    *,
    accumulate: int = 1,
    workers: int = 0,
    validate: Validate | None = None,
    checkpoint_minutes: float = 5.0,
    tracker: str | None = None,
    stop_after: int | None = None,
) -> SpotViT:
    """Train to the recipe's end and return the model: averaged weights where the recipe has an average.

    Args:
        objective: what to train and for what; see spot.training.objectives.
        accumulate: backward passes per optimiser step, to fit a large batch into little memory.
        validate: the model → named percentages, after every epoch; they join the log.
        checkpoint_minutes: how much work an interruption may cost.
        tracker: an accelerate tracker's name, such as "tensorboard".
        stop_after: leave off after so many steps, with a checkpoint (the run goes on when called again).
    """
    accelerator = accelerated(recipe, accumulate, tracker, folder)
    check_division(recipe.batch_size, accumulate, accelerator.num_processes)
    if accelerator.is_main_process:
        folder.begin()
    model = objective.trained()
    prepare(objective, recipe)
    total = steps_in(recipe, len(plan))
    warmup = min(total, round(recipe.warmup_epochs * len(plan) / recipe.batch_size))
    optimizer = build_optimizer(objective, recipe)
    average = ModelEmaV3(model, decay=recipe.ema, use_warmup=True) if recipe.ema else None
    progress = restore(folder, objective, optimizer, average, accelerator)
    wrapped, optimizer = accelerator.prepare(objective, optimizer)
    if average is not None:
        average.to(accelerator.device)
    if tracker:
        accelerator.init_trackers("spot", config={k: v for k, v in vars(recipe).items() if isinstance(v, (int, float))})

    def save() -> None:
        if accelerator.is_main_process:
            folder.save(state_of(objective, optimizer, average, progress, accelerator), progress.step)

    end = total if stop_after is None else min(total, stop_after)
    stream = parts(
        plan,
        recipe.batch_size,
        range(progress.step, end),
        accumulate=accumulate,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
        workers=workers,
    )
    reporter = Reporter(total, progress.step, shown=accelerator.is_main_process)
    objective.train()
    saved = started = time.monotonic()
    with reporter:
        while progress.step < end:
            rate = learning_rate(recipe, progress.step, total, warmup)
            set_rate(optimizer, rate)
            loss, correct, waited = one_step(accelerator, wrapped, optimizer, stream, recipe, accumulate)
            if not math.isfinite(loss):
                raise InputError(stopped(recipe, progress.step, total, len(plan), loss, rate, folder))
            progress.step += 1
            if average is not None:
                average.update(model, step=progress.step)
            now = time.monotonic()
            progress.seconds += now - started
            started = now
            progress.waited += waited
            progress.loss += loss
            progress.correct += correct
            progress.images += recipe.batch_size
            progress.steps += 1
            reporter.step(progress.step, loss, rate)
            if tracker:
                accelerator.log({"loss": loss, "lr": rate}, step=progress.step)
            if ends_epoch(progress.step, recipe.batch_size, len(plan)) or progress.step == total:
                row = close_epoch(progress, recipe, len(plan), rate)
                if validate is not None:
                    row |= validate(average.module if average is not None else model)
                    objective.train()
                progress.rows.append(row)
                if accelerator.is_main_process:
                    folder.log(progress.rows)
                    save_figure(training_logs({recipe.name: progress.rows}), folder.path / "log.png")
                if tracker:
                    accelerator.log({k: v for k, v in row.items() if v is not None}, step=progress.step)
                reporter.row(row)
            if time.monotonic() - saved >= 60 * checkpoint_minutes:
                save()
                saved = time.monotonic()
    save()
    accelerator.wait_for_everyone()
    if tracker:
        accelerator.end_training()
    finished: SpotViT = average.module if average is not None else model
    if progress.step == total:
        finished = objective.finish(finished)
        if accelerator.is_main_process:
            finished.eval().save_pretrained(folder.path / "model")
    return finished.eval()


def accelerated(recipe: Recipe, accumulate: int, tracker: str | None, folder: RunFolder) -> Accelerator:
    """accelerate, set up for the recipe's precision and the tracker."""
    check_precision(recipe)  # which also tells accelerate, before it asks, whether there is only a CPU
    try:
        return Accelerator(
            mixed_precision=recipe.precision,
            gradient_accumulation_steps=accumulate,
            log_with=tracker,
            project_dir=str(folder.path) if tracker else None,
        )
    except ValueError as error:
        raise InputError(f"accelerate cannot run so: {error}") from error


def check_precision(recipe: Recipe) -> None:
    """Refuse float16 on a CPU, where accelerate would use float32 without a word."""
    if this_process().device.type == "cpu" and recipe.precision == "fp16":
        raise InputError("precision=fp16 needs an accelerator; on a CPU use precision=bf16 or no")


def prepare(objective: Objective, recipe: Recipe) -> None:
    """Set drop path, hold still what has no rate, compile: all that changes no weight."""
    vit = objective.trained().vit
    depth = len(vit.blocks)
    for number, block in enumerate(vit.blocks):
        rate = recipe.drop_path * number / max(1, depth - 1)
        for name in ("drop_path1", "drop_path2"):
            if hasattr(block, name):
                setattr(block, name, DropPath(rate) if rate else nn.Identity())
        if recipe.compile:
            block.compile()
    for name, parameter in objective.named_parameters():
        if rate_scale(name, recipe, depth) == 0:
            parameter.requires_grad_(False)


def one_step(
    accelerator: Accelerator, objective: nn.Module, optimizer: Any, stream: Any, recipe: Recipe, accumulate: int
) -> tuple[float, float, float]:
    """One optimiser step: mean loss and images right over all processes, and seconds waited for data."""
    losses, correct, waited = [], [], 0.0
    for _ in range(accumulate):
        asked = time.monotonic()
        part: Part = next(stream)
        waited += time.monotonic() - asked
        part = part._replace(
            images=part.images.to(accelerator.device, non_blocking=True),
            labels=part.labels.to(accelerator.device, non_blocking=True),
        )
        with accelerator.accumulate(objective):
            with accelerator.autocast():
                outcome = objective(part)
            accelerator.backward(outcome.loss)
            losses.append(outcome.loss.detach())
            correct.append(outcome.correct.detach())
            if accelerator.sync_gradients and recipe.clip_grad is not None:
                accelerator.clip_grad_norm_(objective.parameters(), recipe.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
    loss = accelerator.reduce(torch.stack(losses).mean(), "mean")
    right: Tensor = accelerator.reduce(torch.stack(correct).sum(), "sum")
    return loss.item(), right.item(), waited


def ends_epoch(step: int, batch_size: int, images: int) -> bool:
    """Whether optimiser step number `step` (from 1) is the last that begins in its epoch."""
    return step * batch_size // images > (step - 1) * batch_size // images


def close_epoch(progress: Progress, recipe: Recipe, images: int, rate: float) -> dict[str, Any]:
    """The epoch's row of the log; the sums start again."""
    row = {
        "epoch": round(progress.step * recipe.batch_size / images, 4),
        "step": progress.step,
        "loss": progress.loss / progress.steps,
        "lr": rate,
        "train_top1": None if math.isnan(progress.correct) else 100 * progress.correct / progress.images,
        "seconds": round(progress.seconds, 1),
        "waited_percent": round(100 * progress.waited / max(progress.seconds, 1e-9), 1),
    }
    progress.loss = progress.correct = progress.seconds = progress.waited = 0.0
    progress.images = progress.steps = 0
    return row


def stopped(recipe: Recipe, step: int, total: int, images: int, loss: float, rate: float, folder: RunFolder) -> str:
    """What to say when the loss is no longer a number."""
    last = folder.checkpoints()
    kept = f"the last good checkpoint is {last[0]}" if last else "there is no checkpoint yet"
    return (
        f"the {recipe.objective} loss became {loss} at step {step + 1} of {total} "
        f"(epoch {step * recipe.batch_size / images:.2f}, rate {rate:.2g}, precision {recipe.precision}); "
        f"{kept}; start anew with a lower lr or with clip_grad"
    )


def state_of(
    objective: nn.Module, optimizer: Any, average: ModelEmaV3 | None, progress: Progress, accelerator: Accelerator
) -> dict[str, Any]:
    """Everything that a resumed run needs."""
    return {
        "objective": objective.state_dict(),
        "optimizer": optimizer.state_dict(),
        "average": None if average is None else average.module.state_dict(),
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),  # float16's
        "progress": vars(progress),
    }


def restore(
    folder: RunFolder, objective: nn.Module, optimizer: Any, average: ModelEmaV3 | None, accelerator: Accelerator
) -> Progress:
    """Go on from the folder's newest checkpoint, if it has one."""
    state = folder.load()
    if state is None:
        return Progress()
    objective.load_state_dict(state["objective"])
    optimizer.load_state_dict(state["optimizer"])
    if average is not None:
        average.module.load_state_dict(state["average"])
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    return Progress(**state["progress"])


class Reporter:
    """A bar with the time left on a terminal; elsewhere a line a minute."""

    def __init__(self, total: int, done: int, *, shown: bool) -> None:
        self.total, self.first, self.shown = total, done, shown
        self.bar = report.progress(shown=shown)
        self.task = self.bar.add_task("training", total=total, completed=done)
        self.began = self.spoke = time.monotonic()

    def __enter__(self) -> "Reporter":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, step: int, loss: float, rate: float) -> None:
        self.bar.update(self.task, completed=step, description=f"training  loss {loss:.3f}")
        now = time.monotonic()
        if self.shown and not report.errors.is_terminal and now - self.spoke >= 60:
            self.spoke = now
            left = (now - self.began) / (step - self.first) * (self.total - step)
            print(
                f"step {step}/{self.total}  loss {loss:.4f}  lr {rate:.2e}  {left / 60:.0f} min left", file=sys.stderr
            )

    def row(self, row: Mapping[str, Any]) -> None:
        if self.shown:
            report.errors.print(
                "  ".join(f"{name} {report.text(value, 3)}" for name, value in row.items()), soft_wrap=True
            )


def peak_memory() -> int:
    """Most bytes held at once so far: on the GPU where there is one, otherwise by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
