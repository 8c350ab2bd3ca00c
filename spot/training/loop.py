"""The training loop for all objectives, from one CPU to many nodes (through accelerate).

    objective = OBJECTIVES[type(recipe)](model, recipe)
    stream = TrainingStream(images, recipe, model.data_config)
    Trainer(objective, stream, recipe, options, RunFolder(out, settings)).train()

A checkpoint contains the weights, the optimiser state, the averaged weights and the log. Random numbers depend only on
the seed and the step (spot.draws), so a resumed run gives the weights of an uninterrupted one, bit for bit on a CPU.
"""

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
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
from spot.options import TrainOptions
from spot.plots import save as save_figure
from spot.plots.training import training_logs
from spot.processes import this_process
from spot.training.batches import MicroBatch, MicroBatchSampler, TrainingStream, micro_batches
from spot.training.objectives import Objective
from spot.training.optim import build_optimizer, learning_rate, rate_scale, set_rate
from spot.training.recipes import Recipe
from spot.training.run_folder import RunFolder

Validate = Callable[[SpotViT], Mapping[str, float]]


@dataclass
class Progress:
    """The current step and the log, saved in checkpoints."""

    step: int = 0  # optimiser steps done
    rows: list[dict[str, Any]] = field(default_factory=list)  # the log, one row per epoch
    loss: float = 0.0  # summed over the steps since the last row
    correct: float = 0.0
    steps: int = 0
    seconds: float = 0.0


def count_steps(recipe: Recipe, images: int) -> tuple[int, int]:
    """The number of optimiser steps of a run over this many images, and of its warm-up."""
    if recipe.batch_size > images:
        raise InputError(
            f"recipe {recipe.name} needs at least {recipe.batch_size} images, one batch, but there are {images}; "
            f"use a smaller batch, such as --set batch_size={max(1, images // 2 - images // 2 % 2)}"
        )
    total = max(1, round(recipe.epochs * images / recipe.batch_size))
    warmup = round(recipe.warmup_epochs * images / recipe.batch_size)
    if warmup and warmup >= total:
        raise InputError(
            f"recipe {recipe.name} warms up for {warmup} steps, but the run has {total}, so it would never learn at "
            f"its full rate; use --set warmup_epochs={recipe.epochs / 10:g}"
        )
    return total, warmup


class Trainer:
    """Trains an objective on a stream of images."""

    def __init__(
        self, objective: Objective, stream: TrainingStream, recipe: Recipe, options: TrainOptions, folder: RunFolder
    ) -> None:
        self.objective, self.stream, self.recipe, self.options, self.folder = objective, stream, recipe, options, folder
        self.total, self.warmup = count_steps(recipe, len(stream))
        this_process()  # before accelerate detects devices: tells it if there is only a CPU
        try:
            self.accelerator = Accelerator(
                mixed_precision=recipe.precision,
                gradient_accumulation_steps=options.accumulate,
                log_with=options.tracker,
                project_dir=str(options.out) if options.tracker else None,
            )
        except ValueError as error:
            raise InputError(f"accelerate cannot run with these settings: {error}") from error
        self.main = self.accelerator.is_main_process
        self.model = objective.trained()
        self.progress = Progress()
        self.stopping = Stopping(shown=self.main)
        self.batches(range(0))  # refuses a batch that does not divide
        prepare(objective, recipe)
        optimizer = build_optimizer(objective, recipe)
        self.average = ModelEmaV3(self.model, decay=recipe.ema, use_warmup=True) if recipe.ema else None
        self.wrapped, self.optimizer = self.accelerator.prepare(objective, optimizer)
        if self.average is not None:
            self.average.to(self.accelerator.device)

    def train(self, validate: Validate | None = None) -> SpotViT:
        """Train to the recipe's end and return the model, with averaged weights if the recipe has ema.

        validate: maps the model to named percentages for the log, after every epoch. Ctrl-C writes a checkpoint and
        raises KeyboardInterrupt, with the step from which the run resumes.
        """
        self.restore()
        numbers = {name: value for name, value in vars(self.recipe).items() if isinstance(value, (int, float))}
        self.accelerator.init_trackers("spot", config=numbers)  # none without the option tracker
        progress = self.progress
        batches = self.batches(range(progress.step, self.total))
        self.objective.train()
        began, first = time.monotonic(), progress.step
        saved = printed = began
        with report.progress(shown=self.main) as bar, self.stopping:
            task = bar.add_task("training", total=self.total, completed=first)
            while progress.step < self.total:
                loss, rate = self.step(batches)
                bar.update(task, completed=progress.step, description=f"training  loss {loss:.3f}")
                now = time.monotonic()
                if self.main and not report.errors.is_terminal and now - printed >= 60:  # no bar: one line per minute
                    left = (now - began) / (progress.step - first) * (self.total - progress.step) / 60
                    line = f"step {progress.step}/{self.total}  loss {loss:.4f}  lr {rate:.2e}  {left:.0f} min left"
                    print(line, file=sys.stderr)
                    printed = now
                self.accelerator.log({"loss": loss, "lr": rate}, step=progress.step)
                if self.ends_epoch() or progress.step == self.total:
                    self.close_epoch(rate, validate)
                if self.stopping.agreed:
                    break
                if time.monotonic() - saved >= 60 * self.options.checkpoint_minutes:
                    self.save()
                    saved = time.monotonic()
            self.save()
        self.accelerator.wait_for_everyone()
        if self.options.tracker:
            self.accelerator.end_training()
        if progress.step < self.total:
            raise KeyboardInterrupt(f"stopped; the same command resumes from step {progress.step} of {self.total}")
        trained = self.objective.finish(self.best()).eval()
        if self.main:
            trained.save_pretrained(self.folder.path / "model")
        return trained

    def best(self) -> SpotViT:
        """The model with averaged weights if the recipe has ema, else the trained model."""
        return self.model if self.average is None else self.average.module

    def batches(self, steps: range) -> Iterator[MicroBatch]:
        """This process's micro-batches in some steps."""
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        sampler = MicroBatchSampler(self.recipe.batch_size, steps, self.options.accumulate, process, processes)
        return micro_batches(self.stream, sampler, self.options.workers)

    def step(self, batches: Iterator[MicroBatch]) -> tuple[float, float]:
        """One optimiser step. Returns the mean loss over all processes, and the learning rate."""
        progress, recipe, began = self.progress, self.recipe, time.monotonic()
        rate = learning_rate(recipe, progress.step, self.total, self.warmup)
        set_rate(self.optimizer, rate)
        passes = torch.stack([self.backward(batches) for _ in range(self.options.accumulate)])
        stop = passes.new_tensor(self.stopping.asked)
        sums: Tensor = self.accelerator.reduce(torch.stack([passes[:, 0].mean(), passes[:, 1].sum(), stop]), "sum")
        loss, correct, stops = sums.tolist()
        loss /= self.accelerator.num_processes
        self.stopping.agreed = stops > 0
        if not math.isfinite(loss):
            last = self.folder.checkpoints()
            kept = f"the last good checkpoint is {last[0]}" if last else "there is no checkpoint yet"
            raise InputError(
                f"the {recipe.objective} loss became {loss} at step {progress.step + 1} of {self.total} "
                f"(rate {rate:.2g}, precision {recipe.precision}); {kept}; start anew with a lower lr or with clip_grad"
            )
        progress.step += 1
        progress.steps += 1
        progress.loss += loss
        progress.correct += correct
        if self.average is not None:
            self.average.update(self.model, step=progress.step)
        progress.seconds += time.monotonic() - began
        return loss, rate

    def backward(self, batches: Iterator[MicroBatch]) -> Tensor:
        """One forward and backward pass. Returns the loss and the number of correct predictions, (2,)."""
        accelerator, batch = self.accelerator, next(batches)
        images, labels = (each.to(accelerator.device, non_blocking=True) for each in (batch.images, batch.labels))
        with accelerator.accumulate(self.wrapped):
            with accelerator.autocast():
                outcome = self.wrapped(batch._replace(images=images, labels=labels))
            accelerator.backward(outcome.loss)
            if accelerator.sync_gradients and self.recipe.clip_grad is not None:
                accelerator.clip_grad_norm_(self.wrapped.parameters(), self.recipe.clip_grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.stack(outcome).detach()

    def ends_epoch(self) -> bool:
        """Whether the last step completed an epoch."""
        step, size = self.progress.step, self.recipe.batch_size
        return step * size // len(self.stream) > (step - 1) * size // len(self.stream)

    def close_epoch(self, rate: float, validate: Validate | None) -> None:
        """Write and print the epoch's row of the log, and reset the sums."""
        progress = self.progress
        seen = progress.steps * self.recipe.batch_size
        row = {
            "epoch": round(progress.step * self.recipe.batch_size / len(self.stream), 4),
            "step": progress.step,
            "loss": progress.loss / progress.steps,
            "lr": rate,
            "train_top1": None if math.isnan(progress.correct) else 100 * progress.correct / seen,
            "seconds": round(progress.seconds, 1),
        }
        progress.loss = progress.correct = progress.seconds = 0.0
        progress.steps = 0
        if validate is not None:
            row |= validate(self.best())
            self.objective.train()
        progress.rows.append(row)
        if self.main:
            report.save_csv(self.folder.path / "log.csv", progress.rows)
            save_figure(training_logs({self.recipe.name: progress.rows}), self.folder.path / "log.png")
            shown = {name: f"{value:.2e}" if name == "lr" else report.text(value, 3) for name, value in row.items()}
            report.errors.print("  ".join(f"{name} {value}" for name, value in shown.items()), soft_wrap=True)
        self.accelerator.log({name: value for name, value in row.items() if value is not None}, step=progress.step)

    def stateful(self) -> dict[str, Any]:
        """The objects whose state is in a checkpoint, besides the progress."""
        average = None if self.average is None else self.average.module
        scaler = self.accelerator.scaler  # of float16
        parts = {"objective": self.objective, "optimizer": self.optimizer, "average": average, "scaler": scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def save(self) -> None:
        """Write a checkpoint."""
        if self.main:
            state = {name: part.state_dict() for name, part in self.stateful().items()}
            self.folder.save({**state, "progress": vars(self.progress)}, self.progress.step)

    def restore(self) -> None:
        """Resume from the folder's newest checkpoint, if it has one."""
        state = self.folder.load()
        if state is None:
            return
        try:
            for name, part in self.stateful().items():
                part.load_state_dict(state[name])
            self.progress = Progress(**state["progress"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"the newest checkpoint in {self.folder.path} is not one of this run ({reason}); delete it"
            ) from error


def prepare(objective: Objective, recipe: Recipe) -> None:
    """Set drop path, freeze parameters whose learning rate is 0, and compile."""
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


class Stopping:
    """A context manager: Ctrl-C stops training after the current step, a second one stops it at once."""

    def __init__(self, *, shown: bool) -> None:
        self.shown = shown
        self.asked = False  # in this process
        self.agreed = False  # by all processes, after the same step

    def __enter__(self) -> "Stopping":
        self.in_main_thread = threading.current_thread() is threading.main_thread()  # Python handles signals only there
        self.previous = signal.signal(signal.SIGINT, self.ask) if self.in_main_thread else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.in_main_thread:
            signal.signal(signal.SIGINT, self.previous)

    def ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self.shown:
            report.errors.print("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
