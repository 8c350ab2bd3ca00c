"""What it costs to look: multiply-adds of making one saliency map, which a prior that reads maps has to pay for."""

import math
from pathlib import Path
from typing import Any

from spot.errors import InputError
from spot.store import read_json

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
