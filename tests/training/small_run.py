"""A training run small enough for tests, also as a program that can be killed or run in two processes."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from spot.training.options import Options
from spot.training.recipes import RECIPES, Recipe, override
from spot.training.run import run
from tests.conftest import make_nano

SMALL = {"img_size": 32, "batch_size": 8, "epochs": 3.0, "warmup_epochs": 0.5, "lr": 1e-3, "ema": 0.9}
OWN = {
    "distil": {"budgets": ((4, 9), (16,)), "shares": (1.0, 0.5), "weights": (1.0, 1.0), "head_rate": 1.0},
    "cls-in1k": {},
    "cls-in21k": {},
    "mae-finetune": {},
    "mae-in1k": {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2},
}


def small_recipe(name: str, **changes) -> Recipe:
    return override(RECIPES[name], {**SMALL, **OWN[name], **changes})


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
    return run(make_nano(), small_recipe(name, **changes), Options(**given))


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    small_run(arguments.pop("name"), Path(arguments.pop("data")), Path(arguments.pop("out")), **arguments)
