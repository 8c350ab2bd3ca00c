"""The images that the page can show: samples known from the start, and uploads, kept in memory only.

The page names an image by an id that the server gave out; an id is looked up, never opened as a path.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
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

UPLOAD_BYTES = 20 * 2**20
UPLOAD_PIXELS = 40_000_000
KEPT = 16  # uploads in memory; the oldest goes first
SAMPLES = 24
# Formats that Pillow decodes by itself: others, such as EPS, would start another program.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "AVIF")


@dataclass(frozen=True)
class Picture:
    """An image as a person sees it. `whole` ones were drawn at the model's size and are not cropped."""

    name: str
    image: Image.Image
    whole: bool = False

    def tensor(self, model: Any, times: int = 1) -> Tensor:
        """What the model sees, (1, 3, H, W) normalised, or the same part of the image `times` as large."""
        config, (height, width) = model.data_config, model.img_size
        if self.whole and times == 1 and self.image.size == (width, height):
            pixels = pil_to_tensor(self.image).float().div(255)
            return normalize(pixels, config["mean"], config["std"])[None]
        return evaluation_transform(config, (height * times, width * times))(self.image)[None]


@dataclass(frozen=True)
class Sample:
    """An image of the strip: its id, its name, its class's name where that is known, and how to get it."""

    id: str
    name: str
    label: str | None
    open: Callable[[], Picture]


class Pictures:
    """Samples and uploads by id."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.samples = {sample.id: sample for sample in samples}
        self._uploads: OrderedDict[str, tuple[str, bytes]] = OrderedDict()

    def add(self, name: str, data: bytes) -> str:
        """Keep an uploaded image, after decoding it once, and give it an id."""
        name = "".join(letter for letter in Path(name).name if letter.isprintable())[:120] or "image"
        decode(name, data)
        key = hashlib.sha256(name.encode() + b"\0" + data).hexdigest()[:16]
        self._uploads[key] = (name, data)
        self._uploads.move_to_end(key)
        while len(self._uploads) > KEPT:
            self._uploads.popitem(last=False)
        return key

    def open(self, key: str) -> Picture:
        """The image of an id."""
        if key in self.samples:
            return self.samples[key].open()
        if key not in self._uploads:
            raise InputError("this picture is not on the server any more; drop it on the page again")
        name, data = self._uploads[key]
        return Picture(name, decode(name, data))


def decode(name: str, data: bytes) -> Image.Image:
    """An uploaded image as `spot predict` reads files, within limits of bytes, pixels and formats."""
    if len(data) > UPLOAD_BYTES:
        raise InputError(f"{name} has {len(data) / 2**20:.0f} MB; the page takes up to {UPLOAD_BYTES // 2**20} MB")
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise InputError(f"{name} is too large; the page takes up to {UPLOAD_PIXELS // 10**6} megapixels") from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, OverflowError):
        raise InputError(f"{name} is not an image that the page can read; PNG, JPEG and WebP work") from None
    if image.width * image.height > UPLOAD_PIXELS:
        size = f"{image.width} × {image.height}"
        raise InputError(f"{name} is {size} pixels; the page takes up to {UPLOAD_PIXELS // 10**6} megapixels")
    return open_image(image)


def file_samples(paths: Sequence[Path]) -> list[Sample]:
    """The image files of the command line, each read once to see that it is one."""

    def opened(path: Path) -> Picture:
        return Picture(path.name, open_image(path))

    for path in paths:
        opened(path)
    return [Sample(_id(str(n), path.name), path.name, None, partial(opened, path)) for n, path in enumerate(paths)]


def scene_samples() -> list[Sample]:
    """Scenes of the test split, one class after another."""
    scenes = Scenes("test")

    def opened(index: int) -> Picture:
        image, _, key = scenes[index]
        return Picture(key, to_pil_image(torch.round(image * 255).to(torch.uint8)), whole=True)

    # Outline and texture change from one sample to the next.
    indices = [5 * number for number in range(SAMPLES)]
    return [Sample(f"scene-{n}", scenes.keys[n], CLASSES[n % len(CLASSES)], partial(opened, n)) for n in indices]


def folder_samples(data: str, model: Any, split: str = "val") -> list[Sample]:
    """Images of a folder or data set, spread evenly over its classes."""
    images = open_data(data, split=split, transform=pil_to_tensor, classes=class_folders(model), limit=SAMPLES)
    names = class_names(model) or images.classes

    def opened(index: int) -> Picture:
        return Picture(images.keys[index], open_image(images.source[images.order[index]][0]))

    samples = []
    for index, key in enumerate(images.keys):
        _, label = images.source[images.order[index]]
        known = names[label] if label is not None and 0 <= label < len(names) else None
        samples.append(Sample(_id(data, key), key, known, partial(opened, index)))
    return samples


def _id(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
