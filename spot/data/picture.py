"""One image: read as a person sees it, and made into what a model sees."""

import math
import os
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from PIL import Image, ImageOps

from spot.errors import InputError, unknown

if TYPE_CHECKING:  # an exported file is run without torch
    from torchvision.transforms import Compose

Fit = Literal["crop", "whole", "squash", "full"]

CROP_RATIO = 0.875
PIXELS = 120_000_000  # a larger image is refused before it is decoded: a small PNG can claim any size
LONGEST = 16  # times the short side: a longer image is cropped before it is resized


def open_image(source: str | Path | IO[bytes] | Image.Image) -> Image.Image:
    """The image as a person sees it, in RGB: upright, first frame, transparent parts on white.

    Sixteen bits are scaled to eight, CMYK and palettes converted. Raises InputError, naming the
    file, for what is no image, is cut short, or has more than PIXELS.
    """
    name = source if isinstance(source, (str, Path)) else getattr(source, "name", "the image")
    if isinstance(source, (str, Path)) and not os.path.isfile(source):
        what = "a folder" if os.path.isdir(source) else "missing"
        raise InputError(f"an image file was expected, but {name} is {what}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limit below says it, and a damaged file what cannot be read
            image = source if isinstance(source, Image.Image) else Image.open(source)
            if image.width * image.height > PIXELS:
                raise Image.DecompressionBombError
            image.load()
            image = ImageOps.exif_transpose(image)
    except Image.DecompressionBombError:
        raise InputError(f"{name} is too large to decode; scale it below {PIXELS // 10**6} megapixels first") from None
    except Exception as error:  # Pillow's decoders raise almost anything on a damaged file
        reason = "is not an image" if "cannot identify" in str(error) else f"cannot be read: {error}"
        raise InputError(f"{name} {reason}") from None
    return as_rgb(image, name)


def as_rgb(image: Image.Image, name: object) -> Image.Image:
    """Convert any of Pillow's modes to RGB without clipping or showing hidden colours."""
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


def evaluation_transform(data_config: dict[str, Any], size: int | tuple[int, int] | None = None) -> "Compose":
    """The paper's evaluation transform: bicubic, centre crop of 0.875, the model's own mean and std.

    At the model's 224 × 224 the short side becomes 256. `data_config` is what timm's
    resolve_model_data_config returns (SpotViT.data_config); `size` (H, W) replaces the model's.
    """
    from timm.data import create_transform
    from timm.data.transforms import ResizeKeepRatio
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, ToTensor

    height, width = (size, size) if isinstance(size, int) else size or data_config["input_size"][-2:]
    mean, std = data_config["mean"], data_config["std"]
    if height == width:
        steps = create_transform(
            height,
            interpolation="bicubic",
            crop_pct=CROP_RATIO,
            crop_mode="center",
            mean=mean,
            std=std,
        ).transforms
    else:  # timm would resize with bilinear interpolation here, whatever it is asked for
        scaled = (int(height / CROP_RATIO), int(width / CROP_RATIO))
        resize = ResizeKeepRatio(scaled, interpolation=InterpolationMode.BICUBIC.value)
        steps = [resize, CenterCrop((height, width)), ToTensor(), Normalize(mean, std)]
    return Compose([narrow, *steps])


def photo_transform(data_config: dict[str, Any], fit: Fit = "crop") -> "Compose":
    """How a photograph of any shape becomes what a model sees.

    "crop" is the evaluation transform, whose square loses what lies outside; "squash" scales both
    sides to the model's; "whole" keeps image and shape, with as many pixels as the model's square has;
    "full" keeps every pixel, for a model that finds places in large pictures (spot/placement/finder.py).
    """
    from torchvision.transforms import Compose, Normalize, ToTensor

    if fit not in get_args(Fit):
        raise unknown("fit", fit, get_args(Fit))
    if fit == "crop":
        return evaluation_transform(data_config)
    if fit == "full":
        return Compose([ToTensor(), Normalize(data_config["mean"], data_config["std"])])
    height, width = data_config["input_size"][-2:]

    def scaled(image: Image.Image) -> Image.Image:
        size = (width, height)
        if fit == "whole":
            ratio = math.sqrt(height * width / (image.width * image.height))
            size = (max(1, round(image.width * ratio)), max(1, round(image.height * ratio)))
        return image.resize(size, Image.Resampling.BICUBIC)

    return Compose([narrow, scaled, ToTensor(), Normalize(data_config["mean"], data_config["std"])])


def narrow(image: Image.Image) -> Image.Image:
    """Cut an image to 16 times its short side: 20,000 × 1 would be resized to five million × 256."""
    side = LONGEST * min(image.size)
    if max(image.size) <= side:
        return image
    width, height = (min(length, side) for length in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
