"""The recipes of the built-in models train with the verbs of spot."""

import csv
import runpy
import sys
from unittest.mock import patch

import pytest
import torch

from spot.data.difficulty import needle
from spot.data.scenes import Scenes
from spot.training.batches import MicroBatch
from spot.training.new_weights import random_vit
from spot.training.objectives import OBJECTIVES
from spot.training.recipes import RECIPES, override
from tools.recipes import BUILT_IN, NearObject, around_object

MODEL = "vit_small_patch16_rope_224"
SHAPE = {"img_size": 64, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "init_values": 1.0}
FRESH = ["num_classes=32", *(f"{name}={value}" for name, value in SHAPE.items())]
NEEDLE = BUILT_IN[-1]
CHANGES = ("img_size=64", "budgets=(9,16,64)", "epochs=3", "batch_size=16", "warmup_epochs=0.1", "lr=1e-2")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_spot_trains_with_them(tmp_path, monkeypatch):
    """Pictures are as large as crops, with a grid of 64 instead of 576 cells."""
    given = ("--recipe", "scenes-needle", "--data", "needle:64", "--limit", "192", "--out", str(tmp_path / "run"))
    words = ("retrofit", MODEL, "--fresh", *FRESH, *given, "--set", *CHANGES, "precision=no")
    monkeypatch.setattr(sys, "argv", ["tools.recipes", *words])
    with patch.dict(RECIPES), patch.dict(OBJECTIVES):
        runpy.run_module("tools.recipes", run_name="__main__")
    losses = [float(row["loss"]) for row in csv.DictReader((tmp_path / "run" / "log.csv").open())]
    assert len(losses) == 3 and losses[-1] < losses[0]


def batch_of_needles(step: int, first: int, count: int) -> MicroBatch:
    images = torch.zeros(count, 3, 192, 192)
    return MicroBatch(step, first, 64, images, torch.zeros(count, dtype=torch.int64))


def test_the_share_asked_for_stands_around_the_object_and_the_rest_anywhere():
    centers = Scenes("train", difficulty=needle(), seed=5).draw(range(192, 256)).centers
    even = 0.1 + 0.8 * torch.rand(64, 40, 2, generator=torch.Generator().manual_seed(2))
    moved = around_object(even, batch_of_needles(3, 0, 64), 0.75, seed=5)
    assert torch.equal(moved[:, 30:], even[:, 30:]) and moved.min() > 0 and moved.max() < 1
    pixels = 192 * (moved[:, :30].amax(1) - moved[:, :30].amin(1))
    assert pixels.min() > 20 and pixels.max() < 96
    middle = (moved[:, :30].amax(1) + moved[:, :30].amin(1)) / 2
    inner = (centers - 0.5).abs().amax(1) < 0.2  # elsewhere the square is moved into the frame
    assert 192 * (middle - centers)[inner].abs().max() < 96 / 6 + 10
    halves = [around_object(even[at : at + 32], batch_of_needles(3, at, 32), 0.75, seed=5) for at in (0, 32)]
    assert torch.equal(torch.cat(halves), moved)
    assert torch.equal(around_object(even, batch_of_needles(3, 0, 64), 0.0, seed=5), even)


def test_tokens_are_around_the_object_unless_they_are_the_grid():
    model = random_vit(MODEL, SHAPE)
    changes = {"img_size": 64, "precision": "no", "priors": ("isotropic",), "object_shares": (1.0,)}
    images = torch.zeros(2, 3, 64, 64)
    batch = MicroBatch(0, 0, 2, images, torch.zeros(2, dtype=torch.int64))
    for tokens, around in ((16, True), (64, False)):
        objective = NearObject(model, override(NEEDLE, {**changes, "budgets": (tokens,)}))
        placed = objective.place(images, batch, torch.Generator().manual_seed(0))
        assert torch.equal(placed, model.place(images, tokens=tokens, prior="isotropic")) != around
