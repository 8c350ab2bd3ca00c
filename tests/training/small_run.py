"""A training run small enough for tests, also as a program that can be interrupted."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from spot.options import TrainOptions
from spot.training.loop import Trainer
from spot.training.recipes import RECIPES, Recipe, override
from spot.training.run import run
from tests.conftest import make_nano

SMALL = {"img_size": 32, "batch_size": 8, "epochs": 3.0, "lr": 1e-3, "ema": 0.9}
DISTIL = {"budgets": ((4, 9), (16,)), "shares": (1.0, 0.5), "weights": (1.0, 1.0), "head_rate": 1.0}
OWN = {
    "distil": DISTIL,
    "distil-sizes": DISTIL,
    "distil-again": {**DISTIL, "min_tokens": 4, "priors": ("isotropic", "sobol")},
    "finetune-small": {"budgets": (4, 9, 16)},
    "mae-in1k": {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2},
}


def small_recipe(name: str, **changes) -> Recipe:
    values = {**SMALL, **OWN.get(name, {}), **changes}
    return override(RECIPES[name], {"warmup_epochs": values["epochs"] / 6, **values})


def make_images(folder: Path, classes: int = 10, each: int = 3) -> Path:
    """Noise on a gradient, a folder per class."""
    for label in range(classes):
        (folder / f"{label}").mkdir(parents=True)
        for number in range(each):
            draw = np.random.default_rng(label * each + number)
            pixels = draw.integers(0, 128, (40, 48, 3)) + np.arange(48)[:, None] * (label + 1) // 4
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{label}" / f"{number}.png")
    return folder


def small_run(name: str, data: Path, out: Path, options: dict | None = None, **changes):
    given = {"data": str(data), "out": out, "checkpoint_minutes": 0.0, **(options or {})}
    return run(make_nano(), small_recipe(name, **changes), TrainOptions(**given))


@contextmanager
def interrupted_after(step: int, monkeypatch):
    """Within the block a run stops after this step, as after Ctrl-C."""
    whole = Trainer.step

    def stepped(self, stream):
        loss = whole(self, stream)
        self.stopping.agreed = self.progress.step == step
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stepped)
        with pytest.raises(KeyboardInterrupt, match=f"resumes from step {step} of"):
            yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    small_run(arguments.pop("name"), Path(arguments.pop("data")), Path(arguments.pop("out")), **arguments)
