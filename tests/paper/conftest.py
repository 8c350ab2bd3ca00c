"""Two small models and sixty small images, as a lab."""

import numpy as np
import pytest
from PIL import Image

from paper import timing
from paper.backbone import backbones
from paper.lab import Lab
from paper.settings import StudySettings
from spot.models.checkpoints import save_folder
from tests.conftest import make_nano


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A folder with models `one` and `two`, `images`, `bank` and saliency `maps` of both."""
    root = tmp_path_factory.mktemp("small")
    for seed, name in enumerate(("one", "two")):
        save_folder(make_nano(seed), root / name)
    numbers = np.random.default_rng(0)
    for folder, count in (("images", 60), ("bank", 40)):
        for index in range(count):
            key = f"{index % 10}/{folder[0]}{index:02d}.png"
            for top, shape in ((folder, (32, 32, 3)), ("maps", (32, 32))):
                path = root / top / key
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(numbers.integers(1, 256, shape, dtype=np.uint8)).save(path)
    return root


@pytest.fixture
def make_lab(small, tmp_path):
    """A function that makes a lab on the small data, with its own cache unless another is named."""

    def make(models=("one", "two"), **options) -> Lab:
        given = {"data": str(small / "images"), "tokens": (4, 9), "seeds": 2, "oracle_limit": 30, "workers": 0}
        given |= {"saliency": str(small / "maps"), "bank": str(small / "bank"), **options}
        cache = given.pop("cache", tmp_path / "cache")
        return Lab(backbones([str(small / name) for name in models]), StudySettings(**given), cache=cache)

    return make


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def lab(make_lab, shared_cache, monkeypatch):
    """Both models, with few rounds of timing, and one cache for all tests of a file."""
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setitem(timing.BATCH, "cpu", 2)
    return make_lab(cache=shared_cache)
