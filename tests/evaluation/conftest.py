"""Images to measure on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def write_images() -> Callable[..., Path]:
    """A function that fills a folder with noise in ten class folders, named by class index."""

    def write(root: Path, count: int = 23) -> Path:
        numbers = np.random.default_rng(0)
        for index in range(count):
            path = root / str(index % 10) / f"{index:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numbers.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
        return root

    return write
