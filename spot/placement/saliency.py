"""Saliency maps: where an image is worth looking at (paper, "Salient" prior and the saliency gain).

A saliency maps RGB images (B, 3, H, W) in [0, 1] to maps (B, H, W) in [0, 1] of the same size.
Computed maps are stretched: the least salient pixel of an image is 0, the most salient 1; where all
pixels are alike the map is 1 everywhere.

    spectral_residual          needs no weights
    OnnxSaliency(file)         a salient-object network such as U²-Net        extra [onnx]
    ClipSeg(prompt)            what a text describes, the paper's choice       extra [clipseg]
    MapFolder(folder)          maps on disk, PNG, by image name

Models see normalised images: `resolve_saliency` makes any source (a name, a file, a folder, a function,
known masks) into one that takes images as a model sees them, as `SpotViT.saliency` does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision.transforms.functional import normalize

from spot.data.picture import open_image
from spot.errors import InputError, unknown
from spot.placement.priors import PRIORS, AnyPrior, resolve_prior

Saliency = Callable[[Tensor], Tensor]  # RGB images (B, 3, H, W) in [0, 1] → maps (B, H, W)

SALIENCIES = ("spectral", "clipseg")
CLIPSEG = "CIDAS/clipseg-rd64-refined"
PROMPT = "the main object"  # for CLIPSeg when nothing is known of the image


def spectral_residual(images: Tensor) -> Tensor:
    """What is unexpected in an image's spectrum (Hou and Zhang, 2007): no weights, a few milliseconds."""
    side, blur = 64, 2.5  # the longer side, which sets the scale of what stands out, and its smoothing, in pixels
    images = _checked_images(images)
    height, width = images.shape[-2:]
    if not len(images):
        return images.new_zeros(0, height, width)  # some builds of the Fourier transform refuse an empty batch
    scale = side / max(height, width)
    small = (max(1, round(height * scale)), max(1, round(width * scale)))
    grey = (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    # A spectrum repeats the image: led over to its mean first, or the jump between its edges would stand out.
    grey = _resized(grey, small)
    mean, margin = grey.mean((-2, -1), keepdim=True), side // 4
    plain = grey.std((-2, -1), correction=0) < 0.5 / 255  # nothing but rounding to find
    grey = F.pad(grey - mean, (margin,) * 4, mode="replicate")
    fade = 0.5 - 0.5 * torch.cos(torch.linspace(0, math.pi, margin + 2, device=grey.device)[1:-1])
    for length, shape in ((grey.shape[-2], (-1, 1)), (grey.shape[-1], (1, -1))):
        taper = torch.ones(length, device=grey.device)
        taper[:margin], taper[-margin:] = fade, fade.flip(0)
        grey = grey * taper.view(shape)
    spectrum = torch.fft.fft2(grey)
    amplitude = spectrum.abs().clamp(min=1e-8).log()
    expected = F.avg_pool2d(F.pad(amplitude, (1, 1, 1, 1), mode="circular"), 3, 1)
    surprise = torch.fft.ifft2(torch.polar((amplitude - expected).exp(), spectrum.angle())).abs().square()
    surprise = _blurred(surprise[..., margin:-margin, margin:-margin], blur)
    maps = _resized(surprise, (height, width))[:, 0]
    return stretched(maps * ~plain[..., None])


class OnnxSaliency:
    """A salient-object network in ONNX form, of U²-Net's convention.

    One RGB input (B, 3, S, S) normalised as for ImageNet; the first output is the map, sigmoid applied.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise InputError(f"an ONNX model was expected, but {path} is not a file")
        try:
            import onnxruntime
        except ImportError:
            raise InputError("ONNX models need onnxruntime; pip install 'spot-vit[onnx]'") from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, onnxruntime.get_available_providers())
        except Exception as error:  # onnxruntime's own exceptions derive from nothing narrower
            reason = str(error).splitlines()[0]
            raise InputError(f"{path} is not an ONNX model that onnxruntime can run: {reason}") from None
        entry = self.session.get_inputs()[0]
        sides = [side if isinstance(side, int) else 320 for side in entry.shape[-2:]]
        self.input, self.size, self.name = entry.name, (sides[0], sides[1]), Path(path).name

    def __call__(self, images: Tensor) -> Tensor:
        """Maps (B, H, W) of RGB images (B, 3, H, W) in [0, 1]."""
        images = _checked_images(images)
        # U²-Net was trained on images divided by their brightest value.
        inputs = images / images.amax((1, 2, 3), keepdim=True).clamp(min=1e-6)
        arrays = normalize(_resized(inputs, self.size), IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD).cpu().numpy()
        # One at a time: exported networks often fix the batch at 1.
        maps = [self.session.run(None, {self.input: arrays[i : i + 1]})[0] for i in range(len(arrays))]
        small = torch.from_numpy(np.concatenate(maps)).to(images.device).reshape(len(images), 1, *self.size)
        return stretched(_resized(small, images.shape[-2:])[:, 0])


class ClipSeg:
    """CLIPSeg through transformers: how much each pixel belongs to what a text describes."""

    def __init__(self, prompt: str = PROMPT, checkpoint: str | Path = CLIPSEG, side: int = 352) -> None:
        """
        Args:
            prompt: a class name or a generic text, for images that come without their own.
            checkpoint: a hub id or a folder.
            side: images are scaled to side × side, 352 as in training.
        """
        try:
            from transformers import AutoTokenizer, CLIPSegForImageSegmentation
        except ImportError:
            raise InputError("CLIPSeg needs transformers; pip install 'spot-vit[clipseg]'") from None
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
            self.model = CLIPSegForImageSegmentation.from_pretrained(str(checkpoint)).eval().requires_grad_(False)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"CLIPSeg could not be loaded from {checkpoint}: {reason}") from None
        self.prompt, self.side, self.name = prompt, side, f"clipseg:{prompt}"

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str] | None = None) -> Tensor:
        """Maps (B, H, W) of RGB images (B, 3, H, W) in [0, 1], with a prompt each or the same for all."""
        images = _checked_images(images)
        prompts = [self.prompt] * len(images) if prompts is None else list(prompts)
        if len(prompts) != len(images):
            raise InputError(f"CLIPSeg needs one prompt per image, got {len(prompts)} for {len(images)} images")
        self.model.to(images.device)
        words = self.tokenizer(prompts, padding=True, truncation=True, return_tensors="pt").to(images.device)
        pixels = normalize(_resized(images, (self.side, self.side)), IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
        words = {name: words[name] for name in ("input_ids", "attention_mask")}
        logits = self.model(pixel_values=pixels, interpolate_pos_encoding=True, **words).logits
        maps = logits.reshape(len(images), 1, *logits.shape[-2:]).sigmoid()  # one image comes without B
        return stretched(_resized(maps, images.shape[-2:])[:, 0])


class MapFolder:
    """Maps on disk: for the image `a/b.jpg` the grey picture `a/b.png` in the folder, of the image's size.

    A map goes through the same transform as its image (from PIL to normalised (3, H, W), by the "mean" and "std"
    of data_config), so it fits what the model sees. With the images' root a map of another size is refused.
    """

    def __init__(
        self,
        folder: str | Path,
        transform: Callable[[Image.Image], Tensor],
        data_config: Mapping[str, Any],
        root: str | Path | None = None,
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"a folder of saliency maps was expected, but {folder} is not one")
        self.transform, self.data_config, self.root = transform, data_config, root

    def __call__(self, images: Tensor, keys: Sequence[str]) -> Tensor:
        """Maps (B, H, W) for images (B, C, H, W) as the model sees them, by their keys."""
        pictures = torch.stack([self.transform(self.open(key)) for key in keys])
        return rgb(pictures, self.data_config).mean(1).to(images.device)

    def open(self, key: str) -> Image.Image:
        """The map of an image, as a picture."""
        path = map_path(self.folder, key)
        if not path.is_file():
            raise InputError(f"there is no saliency map for image {key!r}: {path} is missing")
        try:
            picture = open_image(path)
        except InputError as error:
            raise InputError(f"the saliency map of image {key!r} cannot be read: {error}") from None
        image = None if self.root is None else Path(self.root) / key
        if image is not None and image.is_file() and picture.size != (size := _size(image)):
            raise InputError(
                f"the saliency map {path} is {picture.width} × {picture.height}, but its image is "
                f"{size[0]} × {size[1]} (width × height); make maps of the image's size"
            )
        return picture


@lru_cache(maxsize=4)
def open_saliency(source: str | Path) -> Saliency:
    """The saliency of a name ("spectral", "clipseg", "clipseg:PROMPT") or of an .onnx file."""
    name, _, prompt = str(source).partition(":")
    if name == "clipseg":
        return ClipSeg(prompt or PROMPT)
    if str(source) == "spectral":
        return spectral_residual
    if Path(source).suffix == ".onnx":
        return OnnxSaliency(source)
    raise unknown("saliency", str(source), SALIENCIES, hint="or give an .onnx file or a folder of PNG maps")


class KeyedSaliency:
    """Maps (B, H, W) for images (B, C, H, W) as the model sees them and, where the source needs them, their keys."""

    def __init__(self, maps: Callable[[Tensor, Sequence[str]], Tensor], name: str, *, needs_keys: bool = False) -> None:
        self.maps, self.name, self.needs_keys = maps, name, needs_keys

    def __call__(self, images: Tensor, keys: Sequence[str] | None = None) -> Tensor:
        if self.needs_keys and keys is None:
            raise InputError(f"the saliency maps of {self.name} are found by the images' names; pass keys")
        return checked_maps(self.maps(images, keys or ()), images, keys)


Source = str | Path | Saliency | Tensor | KeyedSaliency  # what resolve_saliency takes


def resolve_saliency(
    source: Source,
    data_config: Mapping[str, Any],
    transform: Callable[[Image.Image], Tensor],
    root: str | Path | None = None,
) -> KeyedSaliency:
    """Any source of maps, for images as a model sees them.

    Args:
        source: a name, an .onnx file or a folder of maps; a function of RGB images in [0, 1]; or known maps (B, H, W).
        data_config: the model's, with its "mean" and "std".
        transform, root: see MapFolder; used only for maps on disk.
    """
    if isinstance(source, KeyedSaliency):
        return source
    if isinstance(source, Tensor):
        return KeyedSaliency(lambda images, keys: source.to(images.device, torch.float32), "given")
    if not isinstance(source, (str, Path)):
        saliency, name = source, getattr(source, "__name__", "saliency")
    elif Path(source).is_dir():
        return KeyedSaliency(MapFolder(source, transform, data_config, root), Path(source).name, needs_keys=True)
    else:
        saliency, name = open_saliency(source), Path(source).name
    return KeyedSaliency(lambda images, keys: saliency(rgb(images, data_config)), name)


def maps_for(
    model: Any,
    priors: Sequence[AnyPrior],
    source: str | Path | None,
    root: str | Path | None = None,
    transform: Callable[[Image.Image], Tensor] | None = None,
) -> KeyedSaliency | None:
    """The maps that some priors need of a SpotViT's images: of `source`, by default spectral; None where none does.

    root, transform: see MapFolder; by default the model's own transform.
    """
    if any(resolve_prior(prior).needs_map for prior in priors):
        return resolve_saliency(source or "spectral", model.data_config, transform or model.transform(), root)
    if source is not None:
        needing = ", ".join(name for name, prior in PRIORS.items() if prior.needs_map)
        raise InputError(f"got saliency {str(source)!r}, but no prior that draws from maps: {needing}")
    return None


def rgb(images: Tensor, data_config: Mapping[str, Any]) -> Tensor:
    """Images in [0, 1] again, of images normalised with a model's "mean" and "std"."""
    mean, std = (images.new_tensor(data_config[name])[:, None, None] for name in ("mean", "std"))
    return (images * std + mean).clamp(0, 1)


def stretched(maps: Tensor) -> Tensor:
    """Maps (B, H, W) from 0 to 1, each by its own range; a constant map becomes 1."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return torch.where(high > low, (maps - low) / (high - low), torch.ones_like(maps))


def checked_maps(maps: Tensor, images: Tensor, keys: Sequence[str] | None = None) -> Tensor:
    """Refuse maps that are not the images' (B, H, W), leave [0, 1], or say nothing (all zero)."""
    needed = (len(images), *images.shape[-2:])
    if tuple(maps.shape) != needed:
        raise InputError(f"saliency maps must have the images' size {needed}, got {tuple(maps.shape)}")
    flat = maps.flatten(1)
    inside = (flat >= 0).all(1) & (flat <= 1).all(1)  # false for NaN too
    for good, trouble in ((inside, "leaves [0, 1]"), (flat.amax(1) > 0, "is zero everywhere")):
        if not good.all():
            row = int((~good).nonzero()[0])
            which = f"image {keys[row]!r}" if keys is not None else f"image {row}"
            raise InputError(f"the saliency map of {which} {trouble}")
    return maps


def map_path(folder: str | Path, key: str) -> Path:
    """Where the map of an image is kept."""
    return (Path(folder) / key).with_suffix(".png")


def _checked_images(images: Tensor) -> Tensor:
    if images.ndim != 4 or images.shape[1] != 3:
        raise InputError(f"a saliency takes RGB images (B, 3, H, W), got {tuple(images.shape)}")
    if not images.is_floating_point() or (images.numel() and (images.min() < 0 or images.max() > 1)):
        raise InputError(
            "a saliency takes images in [0, 1]; for normalised ones use resolve_saliency, or model.saliency_maps"
        )
    return images.float()


def _resized(images: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(images, tuple(size), mode="bilinear", antialias=True, align_corners=False)


def _blurred(maps: Tensor, sigma: float) -> Tensor:
    """Maps (B, 1, H, W) under a Gaussian, the border repeated."""
    reach = int(3 * sigma + 0.5)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=maps.device) / sigma) ** 2)
    kernel = (kernel / kernel.sum()).to(maps.dtype)
    padded = F.pad(maps, (reach,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel[None, None, None]), kernel[None, None, :, None])


def _size(path: Path) -> tuple[int, int]:
    """(width, height) of a picture as a person sees it, without decoding it."""
    try:
        with Image.open(path) as picture:
            sideways = picture.getexif().get(0x0112, 1) >= 5
            return (picture.height, picture.width) if sideways else (picture.width, picture.height)
    except Exception as error:  # Pillow's decoders raise almost anything on a damaged file
        raise InputError(f"{path} cannot be read: {error}") from None
