"""The images that the page can show: samples, and uploads kept only in memory.

The page identifies an image by an id from the server. An id is looked up, never opened as a path.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import normalize, pil_to_tensor, to_pil_image

from spot.data.classes import class_folders, class_names
from spot.data.images import open_data
from spot.data.picture import evaluation_transform, open_image
from spot.data.scenes import CLASSES, Scenes
from spot.errors import InputError

UPLOAD_PIXELS = 40_000_000
KEPT = 16  # uploads in memory; the oldest is dropped first
SAMPLES = 24
# Formats that Pillow decodes itself. Others, such as EPS, would start another program.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "AVIF")


@dataclass(frozen=True)
class Picture:
    """An image in RGB. With `whole`, it was drawn at the model's size and is not cropped."""

    name: str
    image: Image.Image
    whole: bool = False

    def tensor(self, model: Any, times: int = 1) -> Tensor:
        """The model's input (1, 3, H, W), normalised. `times` multiplies its height and width."""
        config, (height, width) = model.data_config, model.img_size
        if self.whole and times == 1 and self.image.size == (width, height):
            pixels = pil_to_tensor(self.image).float().div(255)
            return normalize(pixels, config["mean"], config["std"])[None]
        return evaluation_transform(config, (height * times, width * times))(self.image)[None]


@dataclass(frozen=True)
class Sample:
    """An image of the strip: its id, its name, its class's name if known, and a function that opens it."""

    id: str
    name: str
    label: str | None
    open: Callable[[], Picture]


class PictureStore:
    """Samples and uploads by id."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        self._uploads: OrderedDict[str, tuple[str, bytes]] = OrderedDict()

    def add(self, name: str, data: bytes) -> str:
        """Decode an uploaded image once, keep it, and return its id."""
        name = "".join(letter for letter in Path(name).name if letter.isprintable())[:120] or "image"
        decode(name, data)
        key = hashlib.sha256(name.encode() + b"\0" + data).hexdigest()[:16]
        self._uploads[key] = (name, data)
        self._uploads.move_to_end(key)
        while len(self._uploads) > KEPT:
            self._uploads.popitem(last=False)
        return key

    def open(self, key: str) -> Picture:
        """The image with this id."""
        if key in self.samples:
            return self.samples[key].open()
        if key not in self._uploads:
            raise InputError("this picture is not on the server any more; drop it on the page again")
        name, data = self._uploads[key]
        return Picture(name, decode(name, data))


def decode(name: str, data: bytes) -> Image.Image:
    """Decode an uploaded image like `spot predict` does, within limits of pixels and formats."""
    Image.init()  # otherwise Pillow has not yet registered some formats
    formats = tuple(kind for kind in FORMATS if kind in Image.OPEN)
    return open_image(BytesIO(data), name=name, formats=formats, max_pixels=UPLOAD_PIXELS)


def file_samples(paths: Sequence[Path]) -> list[Sample]:
    """Samples of the command line's image files. Each is opened once, to refuse files that are not images."""

    def opened(path: Path) -> Picture:
        return Picture(path.name, open_image(path))

    for path in paths:
        opened(path)
    return [Sample(_id(str(n), path.name), path.name, None, partial(opened, path)) for n, path in enumerate(paths)]


def scene_samples() -> list[Sample]:
    """Samples of the scenes' test split."""
    scenes = Scenes("test")

    def opened(index: int) -> Picture:
        image, _, key = scenes[index]
        return Picture(key, to_pil_image(torch.round(image * 255).to(torch.uint8)), whole=True)

    # Successive samples differ in both outline and texture.
    indices = [5 * number for number in range(SAMPLES)]
    return [Sample(f"scene-{n}", scenes.keys[n], CLASSES[n % len(CLASSES)], partial(opened, n)) for n in indices]


def folder_samples(data: str, model: Any, split: str = "val") -> list[Sample]:
    """Samples of a folder or data set, evenly spread over its classes."""
    images = open_data(data, split=split, transform=pil_to_tensor, classes=class_folders(model), limit=SAMPLES)
    names = class_names(model) or images.classes

    def opened(index: int) -> Picture:
        return Picture(images.keys[index], open_image(images.source[images.order[index]][0]))

    samples = []
    for index, key in enumerate(images.keys):
        _, label = images.source[images.order[index]]
        class_name = names[label] if label is not None and 0 <= label < len(names) else None
        samples.append(Sample(_id(data, key), key, class_name, partial(opened, index)))
    return samples


def _id(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
