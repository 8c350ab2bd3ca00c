"""Read one image and transform it to a model's input."""

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
from PIL import Image, ImageOps

from spot.errors import InputError, unknown

if TYPE_CHECKING:  # exported models run without torch
    from torchvision.transforms import Compose

T = TypeVar("T")
Fit = Literal["crop", "whole", "squash", "full"]

CROP_RATIO = 0.875
MAX_PIXELS = 120_000_000  # larger images are refused before decoding: a small PNG can declare any size
MAX_ASPECT = 16  # largest aspect ratio; a longer image is cropped before it is resized


def open_image(
    source: str | Path | IO[bytes] | Image.Image,
    *,
    name: str | None = None,
    formats: tuple[str, ...] | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Open an image in RGB: rotated upright, first frame, transparent parts on white.

    16-bit images are scaled to 8 bits, CMYK and palettes converted. Raises InputError with the file's
    name if it is not an image, is truncated, or has more than `max_pixels` pixels.

    name: by default that of the file. formats: Pillow's names of the formats to accept; by default all.
    """
    name = name or (str(source) if isinstance(source, (str, Path)) else getattr(source, "name", "the image"))
    if isinstance(source, (str, Path)) and not os.path.isfile(source):
        what = "a folder" if os.path.isdir(source) else "missing"
        raise InputError(f"an image file was expected, but {name} is {what}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the errors below cover large and damaged files
            image = source if isinstance(source, Image.Image) else Image.open(source, formats=formats)
            if image.width * image.height > max_pixels:
                raise Image.DecompressionBombError
            image.load()
            image = ImageOps.exif_transpose(image)
    except Image.DecompressionBombError:
        raise InputError(
            f"{name} is too large to decode; scale it below {max_pixels // 10**6} megapixels first"
        ) from None
    except Exception as error:  # Pillow's decoders raise almost anything on a damaged file
        reason = "is not an image" if "cannot identify" in str(error) else f"cannot be read: {error}"
        raise InputError(f"{name} {reason}") from None
    return as_rgb(image, name)


def open_photos(
    paths: Sequence[Path], transform: Callable[[Image.Image], T], *, skip: bool
) -> Iterator[tuple[Path, T]]:
    """Yield transformed photographs. An unreadable one raises InputError or, with `skip`, a warning."""
    count = 0
    for path in paths:
        try:
            image = transform(open_image(path))
        except InputError as error:
            if not skip:
                hint = "; skip=True (--skip-unreadable) continues without it" if len(paths) > 1 else ""
                raise InputError(f"{error}{hint}") from None
            from spot import report  # imports rich, which exported files run without

            report.warn(f"skipped: {error}")
        else:
            count += 1
            yield path, image
    if not count:
        raise InputError("none of the files is an image that can be read")


def as_rgb(image: Image.Image, name: object) -> Image.Image:
    """Convert any Pillow mode to RGB, without clipping and without the colours of transparent pixels."""
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        low, high = float(values.min()), float(values.max())
        top = 65535.0 if image.mode.startswith("I;16") or high > 255 else 255.0
        if image.mode == "F" and high <= 1:
            top = 1.0
        if not 0 <= low <= high <= top:  # false for NaN too
            raise InputError(f"{name} has pixels from {low:g} to {high:g}; save it with 8 or 16 bits first")
        values = values * (255 / top)
        image = Image.fromarray(np.rint(values, out=values).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def evaluation_transform(
    data_config: dict[str, Any], size: tuple[int, int] | None = None, fit: Fit = "crop"
) -> "Compose":
    """The transform of an RGB image of any shape to a model's input, with the model's mean and std.

    data_config: the result of timm's resolve_model_data_config (SpotViT.data_config).
    size: (H, W), instead of the model's.
    fit: "crop" is the paper's evaluation: bicubic, the short side to 256 for a model of 224 × 224, then the central
        square. "squash" resizes both sides to the model's size. "whole" keeps the whole image and its shape, resized to
        the model's number of pixels. "full" keeps every pixel, for a model that finds places in large pictures.

    A model of one channel gets grey levels.
    """
    from torchvision.transforms import Compose, Grayscale, Normalize, ToTensor

    if fit not in get_args(Fit):
        raise unknown("fit", fit, get_args(Fit))
    fitted = partial(fit_image, size=size or data_config["input_size"][-2:], fit=fit)
    mean, std, channels = data_config["mean"], data_config["std"], data_config["input_size"][0]
    if channels == 1:  # grey levels, with the mean of the colours' statistics
        mean, std = ([sum(values) / len(values)] for values in (mean, std))
        return Compose([fitted, Grayscale(), ToTensor(), Normalize(mean, std)])
    return Compose([fitted, ToTensor(), Normalize(mean, std)])


def fit_image(image: Image.Image, size: Sequence[int], fit: Fit) -> Image.Image:
    """Fit an RGB image to (H, W); see `evaluation_transform`."""
    if fit == "full":
        return image
    if fit == "crop":
        return resize_and_crop(image, size)
    image = narrow(image)
    height, width = size
    if fit == "whole":
        ratio = math.sqrt(height * width / (image.width * image.height))
        width, height = (max(1, round(side * ratio)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def resize_and_crop(image: Image.Image, size: Sequence[int]) -> Image.Image:
    """Resize an RGB image with bicubic interpolation and crop its middle to (H, W), as timm does."""
    image = narrow(image)
    height, width = size
    if height == width:
        short = int(height / CROP_RATIO)
        if image.width <= image.height:
            scaled = (short, int(short * image.height / image.width))
        else:
            scaled = (int(short * image.width / image.height), short)
    else:  # the smallest size that still covers the crop's surroundings
        ratio = min(image.height / int(height / CROP_RATIO), image.width / int(width / CROP_RATIO))
        scaled = (round(image.width / ratio), round(image.height / ratio))
    if scaled != image.size:
        image = image.resize(scaled, Image.Resampling.BICUBIC)
    left, top = round((image.width - width) / 2.0), round((image.height - height) / 2.0)
    return image.crop((left, top, left + width, top + height))


def narrow(image: Image.Image) -> Image.Image:
    """Crop an image to 16 times its short side. Otherwise 20,000 × 1 is resized to five million × 256."""
    side = MAX_ASPECT * min(image.size)
    if max(image.size) <= side:
        return image
    width, height = (min(length, side) for length in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
