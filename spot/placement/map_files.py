"""Saliency maps as files: one grey PNG of the image's size per image, found again by the image's name."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor

from spot import report
from spot.data.images import Images
from spot.errors import InputError
from spot.placement.saliency import ClipSeg, map_path, open_saliency
from spot.store import read_json, whole, write_json


def write_maps(data: Images, out: Path, method: str, prompt: str | None = None) -> list[dict[str, Any]]:
    """Make the maps that are not there yet, each file whole or not at all; a row for each that was made.

    data: images (3, H, W) in [0, 1], of any size.
    method, prompt: see `spot.placement.saliency.open_saliency`; the prompt "class" is the name of each
        image's class folder.
    """
    saliency = keyed(method, prompt)
    files = distinct_files(data.keys, out)
    check_method(out, method, prompt)
    todo = [index for index, file in enumerate(files) if not file.exists()]
    rows = []
    for index in report.track(todo, "saliency"):
        sample = data[index]
        if sample is None:
            continue
        image, _, key = sample
        made = saliency(image[None], key)[0]
        with whole(files[index]) as temporary:
            Image.fromarray((made * 255).round().byte().cpu().numpy()).save(temporary)
        share = (made > 0.5).float().mean().item()
        rows.append({"image": key, "mean": made.mean().item(), "above half %": 100 * share, "map": str(files[index])})
    return rows


def keyed(method: str, prompt: str | None) -> Callable[[Tensor, str], Tensor]:
    """A function of one RGB image (1, 3, H, W) in [0, 1] and its key."""
    if prompt is not None and method != "clipseg":
        raise InputError(f"a prompt goes with the method clipseg, not with {method}; got {prompt!r}")
    if prompt is None:
        plain = open_saliency(method)
        return lambda image, key: plain(image)
    model = ClipSeg() if prompt == "class" else ClipSeg(prompt)
    return lambda image, key: model(image, [class_prompt(key)] if prompt == "class" else None)


def class_prompt(key: str) -> str:
    """The name of an image's class folder in words: ImageNet's word for a wnid, else the folder's name."""
    folder = Path(key).parent.name
    if not folder:
        raise InputError(f"the prompt 'class' needs class folders, but {key} is in none")
    info = ImageNetInfo()
    if folder in info.label_names():
        return info.label_name_to_description(folder).split(",")[0]
    return folder.replace("_", " ")


def check_method(out: Path, method: str, prompt: str | None) -> None:
    """Say in the folder what makes its maps and what one costs; refuse to mix two ways of making them."""
    about = {"method": Path(method).name, "prompt": prompt}
    file = out / ABOUT
    there = read_json(file, "what made a folder of maps") if file.exists() else {}
    if "macs" not in there and there in ({}, about):
        write_json(file, {**about, "macs": map_macs(method)})
    elif {name: there.get(name) for name in about} != about:
        raise InputError(f"{out} holds maps made with {there}, not {about}; choose another folder")


def distinct_files(keys: Sequence[str], out: Path) -> list[Path]:
    """Where each image's map goes; refused if two images would share one."""
    owners: dict[Path, str] = {}
    for key in keys:
        file = map_path(out, key)
        if file in owners:
            raise InputError(f"{owners[file]} and {key} would have the same map, {file}; rename one of them")
        owners[file] = key
    return list(owners)


ABOUT = "saliency.json"  # in a folder of maps: what made them, and what one of them cost


def map_macs(source: str | Path) -> int | None:
    """Multiply-adds of one map by a saliency of this name, file or folder; None where they are not known."""
    path = Path(source)
    if path.is_dir():
        known = read_json(path / ABOUT, "what made a folder of maps") if (path / ABOUT).is_file() else {}
        return known.get("macs")
    if path.suffix == ".onnx":
        return onnx_macs(path)
    return spectral_macs() if str(source) == "spectral" else None


def spectral_macs(side: int = 224) -> int:
    """Of the spectral residual of a square image: two Fourier transforms of 96 × 96, two blurs, two resizings."""
    small, padded, taps = 64, 96, 17
    transforms = 2 * 5 * padded**2 * math.log2(padded**2) / 2  # 5 n log n FLOPs each
    blurs = 2 * taps * (small + taps) * small + 9 * padded**2
    resizing = (2 * side / small + 2) * (side * small + small**2)
    return round(transforms + blurs + resizing)


def onnx_macs(path: str | Path) -> int | None:
    """Of the convolutions and matrix products in an ONNX graph, for one image; None without the package onnx."""
    try:
        import onnx
    except ImportError:
        return None
    try:
        model = onnx.load(str(path))
        for entry in model.graph.input:  # one image, of U²-Net's size where the file leaves it open
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
        # A weight is used once at every place of the larger grid: the output's, or a transposed one's input.
        grid = shapes[node.output[0] if node.op_type == "Conv" else node.input[0]]
        return math.prod(shapes[node.input[1]]) * math.prod(grid[2:])
    if node.op_type in ("MatMul", "Gemm"):
        turned = any(each.name == "transA" and each.i for each in node.attribute)
        return math.prod(shapes[node.output[0]]) * shapes[node.input[0]][0 if turned else -1]
    return 0
