"""Fixtures for the whole suite. Tests that need ../shared skip where it is absent."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from PIL import Image

import spot
from spot.commands import verb_function
from spot.models.family import hash_weights
from spot.placement.policy import Policy

VIT_TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
DEIT_TINY = "deit_tiny_patch16_224.fb_in1k"
SHARED = Path(__file__).parents[2] / "shared" / "data"


torch.set_num_threads(1)  # two workers share two cores, and runs that must agree to the bit need one number of threads


def pytest_addoption(parser):
    parser.addoption("--all-models", action="store_true", help="also test the large timm models")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the shared data is not here")
    return SHARED


def real(shared_data: Path, name: str) -> spot.SpotViT:
    return spot.load(name, weights=shared_data / "weights" / f"{name}.safetensors")


@pytest.fixture(scope="session")
def vit_tiny(shared_data) -> spot.SpotViT:
    """Real ViT-Ti/16, adapted and not trained further. Set tokens and prior back if you change them."""
    return real(shared_data, VIT_TINY)


@pytest.fixture(scope="session")
def deit_tiny(shared_data) -> spot.SpotViT:
    return real(shared_data, DEIT_TINY)


def make_nano(seed: int = 0, **options) -> spot.SpotViT:
    """A tiny random ViT: 32 × 32 images, patch 8, width 32, depth 2, 10 classes."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = spot.adapt("vit_tiny_patch16_224", **{**shape, **options})
        with torch.no_grad():
            for parameter in model.parameters():  # so that zero-initialised ones count
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def random_policy(model, **options):
    """A policy whose map is not flat."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Policy(model.patch_size, about={"model": model.name, "hash": hash_weights(model)}, **options)
        for weight in policy.look.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return policy


@cache
def options_of(verb: str) -> set[str]:
    """The options of a verb: --tokens, --help, …"""
    parser = tyro.extras.get_parser(verb_function(verb))
    return {name for action in parser._actions for name in action.option_strings}


@pytest.fixture
def nano() -> spot.SpotViT:
    return make_nano()


def write_noise(folder: Path, count: int, size: tuple[int, int] = (40, 48)) -> Path:
    """Fill a folder with images of noise of so many rows and columns, in ten class folders named by class index."""
    numbers = np.random.default_rng(0)
    for index in range(count):
        path = folder / str(index % 10) / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return folder
