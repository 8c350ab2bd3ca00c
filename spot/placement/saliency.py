"""Saliency maps (paper, "Salient" prior and the saliency gain), their files and their cost.

A saliency function maps RGB images (B, 3, H, W) in [0, 1] to maps (B, H, W) in [0, 1] of the same size. Computed maps
are rescaled per image: the minimum becomes 0, the maximum 1. A constant map becomes 1.

    spectral_residual          needs no weights
    OnnxSaliency(file)         a salient-object network such as U²-Net         extra [onnx]
    ClipSeg(prompt)            the region that a text describes, as the paper  extra [clipseg]

`open_saliency` gives the function for a name or file. `resolve_saliency` converts any source (also a folder of PNG maps
written by `write_maps`, a function, or known masks) to a function of a model's normalised images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageNetInfo
from torch import Tensor
from torchvision.transforms.functional import normalize

from spot import report
from spot.data.images import Images, Transform
from spot.data.picture import open_image
from spot.errors import InputError, unknown
from spot.placement.priors import PRIORS, AnyPrior, check_maps, resolve_prior
from spot.store import atomic_write, read_json, refuse_difference, refuse_no_file, write_json

Saliency = Callable[[Tensor], Tensor]  # RGB images (B, 3, H, W) in [0, 1] → maps (B, H, W)

CLIPSEG = "CIDAS/clipseg-rd64-refined"
PROMPT = "the main object"  # CLIPSeg's default
ABOUT = "saliency.json"  # in a folder of maps: the method that made them, and its multiply-adds


def spectral_residual(images: Tensor) -> Tensor:
    """The spectral residual (Hou and Zhang, 2007)."""
    side, blur = 64, 2.5  # the longer side, which sets the scale of salient regions, and their smoothing, in pixels
    images = _checked_images(images)
    height, width = images.shape[-2:]
    scale = side / max(height, width)
    small = (max(1, round(height * scale)), max(1, round(width * scale)))
    grey = (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    # The FFT assumes a periodic image. Fade the borders to the mean, so that the wrap-around is not salient.
    grey = _resized(grey, small)
    mean, margin = grey.mean((-2, -1), keepdim=True), side // 4
    plain = grey.std((-2, -1), correction=0) < 0.5 / 255  # constant up to rounding
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
    return rescaled(maps * ~plain[..., None])


class OnnxSaliency:
    """A salient-object network in ONNX format, with U²-Net's convention.

    The input is RGB (B, 3, S, S), normalised as for ImageNet. The first output is the map, after the sigmoid.
    """

    def __init__(self, path: str | Path) -> None:
        refuse_no_file(path, "an ONNX model")
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
        self.input, self.size = entry.name, (sides[0], sides[1])

    def __call__(self, images: Tensor) -> Tensor:
        """Maps (B, H, W) of RGB images (B, 3, H, W) in [0, 1]."""
        images = _checked_images(images)
        # U²-Net was trained on images divided by their maximum.
        inputs = images / images.amax((1, 2, 3), keepdim=True).clamp(min=1e-6)
        arrays = normalize(_resized(inputs, self.size), IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD).cpu().numpy()
        # One image at a time: exported networks often have a fixed batch size of 1.
        maps = [self.session.run(None, {self.input: arrays[i : i + 1]})[0] for i in range(len(arrays))]
        small = torch.from_numpy(np.concatenate(maps)).to(images.device).reshape(len(images), 1, *self.size)
        return rescaled(_resized(small, images.shape[-2:])[:, 0])


class ClipSeg:
    """CLIPSeg through transformers: the region that a text describes."""

    def __init__(self, prompt: str = PROMPT, checkpoint: str | Path = CLIPSEG, side: int = 352) -> None:
        """checkpoint: a hub id or a folder. side: images are scaled to side × side, 352 as in training."""
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
        self.prompt, self.side = prompt, side

    @torch.no_grad()
    def __call__(self, images: Tensor, prompt: str | None = None) -> Tensor:
        """Maps (B, H, W) of RGB images (B, 3, H, W) in [0, 1], with another prompt if one is given."""
        images = _checked_images(images)
        prompts = [prompt or self.prompt] * len(images)
        self.model.to(images.device)
        words = self.tokenizer(prompts, padding=True, truncation=True, return_tensors="pt").to(images.device)
        pixels = normalize(_resized(images, (self.side, self.side)), IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
        inputs = {"input_ids": words["input_ids"], "attention_mask": words["attention_mask"], "pixel_values": pixels}
        logits = self.model(interpolate_pos_encoding=True, **inputs).logits
        maps = logits.reshape(len(images), 1, *logits.shape[-2:]).sigmoid()  # one image has no batch axis
        return rescaled(_resized(maps, images.shape[-2:])[:, 0])


@lru_cache(maxsize=4)
def open_saliency(source: str | Path) -> Saliency:
    """The saliency function for a name ("spectral", "clipseg", "clipseg:PROMPT") or an .onnx file."""
    name, _, prompt = str(source).partition(":")
    if name == "clipseg":
        return ClipSeg(prompt or PROMPT)
    if str(source) == "spectral":
        return spectral_residual
    if Path(source).suffix == ".onnx":
        return OnnxSaliency(source)
    hint = "or give an .onnx file or a folder of PNG maps"
    raise unknown("saliency", str(source), ("spectral", "clipseg"), hint=hint)


@dataclass(frozen=True)
class SaliencyMaps:
    """Maps (B, H, W) for a model's images (B, C, H, W) and, if the source needs them, their keys.

    Refuses maps that do not have the images' size, leave [0, 1], or are zero everywhere.
    """

    compute: Callable[[Tensor, Any], Tensor]
    name: str

    def __call__(self, images: Tensor, keys: Sequence[str] | None = None) -> Tensor:
        if not len(images):  # which FFTs and networks refuse
            return torch.zeros(0, *images.shape[-2:], device=images.device)
        maps = check_maps(self.compute(images, keys), images)
        flat = maps.flatten(1)
        in_range = (flat >= 0).all(1) & (flat <= 1).all(1)  # false for NaN too
        for good, trouble in ((in_range, "leaves [0, 1]"), (flat.amax(1) > 0, "is zero everywhere")):
            if not good.all():
                row = int((~good).nonzero()[0])
                which = f"image {keys[row]!r}" if keys is not None else f"image {row}"
                raise InputError(f"the saliency map of {which} {trouble}")
        return maps


Source = str | Path | Saliency | Tensor


def resolve_saliency(
    source: Source, model: Any, root: str | Path | None = None, transform: Transform | None = None
) -> SaliencyMaps:
    """Convert any source of maps to a function of a model's images and their keys.

    Args:
        source: a name, an .onnx file or a folder of maps; a function of RGB images in [0, 1]; or known maps (B, H, W).
        root: the images' folder, to refuse maps on disk that do not have their image's size.
        transform: turns a map on disk into (3, H, W), normalised as the images are. Default: the model's own.
    """
    config = model.data_config
    if isinstance(source, Tensor):
        return SaliencyMaps(lambda images, keys: source.to(images.device, torch.float32), "given")
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        folder, seen = Path(source), transform or model.transform()

        def from_folder(images: Tensor, keys: Sequence[str] | None) -> Tensor:
            if keys is None:
                raise InputError(f"the saliency maps in {folder} are found by the images' names; pass keys")
            pictures = torch.stack([seen(read_map(folder, key, root)) for key in keys])
            return rgb(pictures, config).mean(1).to(images.device)

        return SaliencyMaps(from_folder, folder.name)
    if isinstance(source, (str, Path)):
        saliency, name = open_saliency(source), Path(source).name
    else:
        saliency, name = source, getattr(source, "__name__", "saliency")
    return SaliencyMaps(lambda images, keys: saliency(rgb(images, config)), name)


def maps_for(
    model: Any,
    priors: Sequence[AnyPrior],
    source: str | Path | None,
    root: str | Path | None = None,
    transform: Transform | None = None,
) -> SaliencyMaps | None:
    """The maps that priors need, from `source` (default: the model's own), or None if no prior needs maps.

    root, transform: see `resolve_saliency`.
    """
    if any(resolve_prior(prior).needs_map for prior in priors):
        return resolve_saliency(model.saliency if source is None else source, model, root, transform)
    if source is not None:
        needing = ", ".join(name for name, prior in PRIORS.items() if prior.needs_map)
        raise InputError(f"got saliency {str(source)!r}, but no prior that draws from maps: {needing}")
    return None


def rgb(images: Tensor, data_config: Mapping[str, Any]) -> Tensor:
    """Undo a model's normalisation ("mean" and "std"): images in [0, 1]."""
    mean, std = (images.new_tensor(data_config[name])[:, None, None] for name in ("mean", "std"))
    return (images * std + mean).clamp(0, 1)


def rescaled(maps: Tensor) -> Tensor:
    """Rescale each of the maps (B, H, W) to [0, 1]; a constant map becomes 1."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return torch.where(high > low, (maps - low) / (high - low), torch.ones_like(maps))


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
    """Gaussian blur of maps (B, 1, H, W), with replicated borders."""
    reach = int(3 * sigma + 0.5)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=maps.device) / sigma) ** 2)
    kernel = (kernel / kernel.sum()).to(maps.dtype)
    padded = F.pad(maps, (reach,) * 4, mode="replicate")
    with torch.autocast(maps.device.type, enabled=False):  # convolutions would give bfloat16 maps
        return F.conv2d(F.conv2d(padded, kernel[None, None, None]), kernel[None, None, :, None])


# Maps as files


def write_maps(data: Images, out: Path, method: str) -> list[dict[str, Any]]:
    """Compute missing maps, and write each file atomically. Returns one row per new map.

    Args:
        data: images (3, H, W) in [0, 1], of any size.
        method: see `open_saliency`; with "clipseg:class" the prompt is the name of each image's class folder.
    """
    saliency: Any = open_saliency(method)
    files: dict[Path, str] = {}
    for key in data.keys:
        other = files.setdefault(map_path(out, key), key)
        if other != key:
            raise InputError(f"{other} and {key} would have the same map, {map_path(out, key)}; rename one of them")
    record_method(out, method)
    todo = [index for index, file in enumerate(files) if not file.exists()]
    rows = []
    for index in report.track(todo, "saliency"):
        sample = data[index]
        if sample is None:
            continue
        image, _, key = sample
        options = {"prompt": class_prompt(key)} if method == "clipseg:class" else {}
        map_, file = saliency(image[None], **options)[0], map_path(out, key)
        with atomic_write(file) as temporary:
            Image.fromarray((map_ * 255).round().byte().cpu().numpy()).save(temporary)
        share = (map_ > 0.5).float().mean().item()
        rows.append({"image": key, "mean": map_.mean().item(), "above half %": 100 * share, "map": str(file)})
    return rows


def map_path(folder: str | Path, key: str) -> Path:
    """The file of an image's map: `a/b.png` for the image `a/b.jpg`."""
    return (Path(folder) / key).with_suffix(".png")


def read_map(folder: str | Path, key: str, root: str | Path | None = None) -> Image.Image:
    """The map of an image, as a picture. With the images' root, a map of another size than its image is refused."""
    path = map_path(folder, key)
    if not path.is_file():
        raise InputError(f"there is no saliency map for image {key!r}: {path} is missing")
    try:
        picture = open_image(path)
    except InputError as error:
        raise InputError(f"the saliency map of image {key!r} cannot be read: {error}") from None
    image = None if root is None else Path(root) / key
    if image is not None and image.is_file() and picture.size != (size := _size(image)):
        raise InputError(
            f"the saliency map {path} is {picture.width} × {picture.height}, but its image is "
            f"{size[0]} × {size[1]} (width × height); make maps of the image's size"
        )
    return picture


def _size(path: Path) -> tuple[int, int]:
    """(width, height) of a picture after its EXIF rotation, without decoding it."""
    try:
        with Image.open(path) as picture:
            sideways = picture.getexif().get(0x0112, 1) >= 5
            return (picture.height, picture.width) if sideways else (picture.width, picture.height)
    except Exception as error:  # Pillow's decoders raise almost anything on a damaged file
        raise InputError(f"{path} cannot be read: {error}") from None


def class_prompt(key: str) -> str:
    """A text prompt from an image's class folder: ImageNet's class name for a wnid, else the folder's name."""
    folder = Path(key).parent.name
    if not folder:
        raise InputError(f"the prompt 'class' needs class folders, but {key} is in none")
    info = ImageNetInfo()
    if folder in info.label_names():
        return info.label_name_to_description(folder).split(",")[0]
    return folder.replace("_", " ")


def method_and_prompt(method: str) -> dict[str, Any]:
    """The name of a method and its text prompt, as recorded with maps."""
    name, _, prompt = method.partition(":")
    if name != "clipseg":
        name, prompt = Path(method).name, ""
    return {"method": name, "prompt": prompt or None}


def record_method(out: Path, method: str) -> None:
    """Record the method and the cost of the maps in their folder. Refuses to mix two methods."""
    about = method_and_prompt(method)
    recorded = maps_about(out)
    if recorded:
        refuse_difference(str(out), {name: recorded.get(name) for name in about}, about, "choose another folder")
    if "macs" not in recorded:
        write_json(out / ABOUT, {**about, "macs": map_macs(method)})


def maps_about(folder: Path) -> dict[str, Any]:
    """What a folder of maps records about them: method, prompt and macs. Empty for maps of another program."""
    file = folder / ABOUT
    return read_json(file, "a description of maps") if file.is_file() else {}


# Their cost


def map_macs(source: Source) -> int | None:
    """MACs per map of a saliency source. None if unknown, as for functions and given maps."""
    if not isinstance(source, (str, Path)):
        return None
    path = Path(source)
    if path.is_dir():
        return maps_about(path).get("macs")
    if path.suffix == ".onnx":
        return onnx_macs(path)
    return spectral_macs() if str(source) == "spectral" else None


def spectral_macs(side: int = 224) -> int:
    """MACs of the spectral residual of a square image: two FFTs of 96 × 96, two blurs and two resizings."""
    small, padded, taps = 64, 96, 17
    transforms = 2 * 5 * padded**2 * math.log2(padded**2) / 2  # 5 n log n FLOPs each
    blurs = 2 * taps * (small + taps) * small + 9 * padded**2
    resizing = (2 * side / small + 2) * (side * small + small**2)
    return round(transforms + blurs + resizing)


def onnx_macs(path: str | Path) -> int | None:
    """MACs of the convolutions and matrix products in an ONNX graph, per image. None without the package onnx."""
    try:
        import onnx
    except ImportError:
        return None
    try:
        model = onnx.load(str(path))
        for entry in model.graph.input:  # one image; U²-Net's size for dynamic axes
            for axis, dim in enumerate(entry.type.tensor_type.shape.dim):
                dim.dim_value = dim.dim_value or (1, 3, 320, 320)[axis]
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception as error:  # protobuf's and onnx's own exceptions
        raise InputError(f"{path} is not an ONNX model: {str(error).splitlines()[0]}") from None
    shapes: dict[str, list[int]] = {each.name: list(each.dims) for each in graph.initializer}
    for each in (*graph.value_info, *graph.input, *graph.output):
        shapes[each.name] = [dim.dim_value for dim in each.type.tensor_type.shape.dim]
    return sum(_node_macs(node, shapes) for node in graph.node)


def _node_macs(node: Any, shapes: dict[str, list[int]]) -> int:
    if node.op_type in ("Conv", "ConvTranspose"):
        # Each weight is used once per cell of the larger grid: the output's, or for ConvTranspose the input's.
        grid = shapes[node.output[0] if node.op_type == "Conv" else node.input[0]]
        return math.prod(shapes[node.input[1]]) * math.prod(grid[2:])
    if node.op_type in ("MatMul", "Gemm"):
        turned = any(each.name == "transA" and each.i for each in node.attribute)
        return math.prod(shapes[node.output[0]]) * shapes[node.input[0]][0 if turned else -1]
    return 0
