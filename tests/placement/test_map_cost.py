"""The cost of a map, by hand for a small graph, and in the folder that keeps maps."""

import json

import pytest

from spot.placement.map_files import ABOUT, check_method, map_macs, onnx_macs


def small_graph(path):
    """Conv 3 → 8, 3 × 3, stride 2, on 32 × 32; a depthwise conv; a product with 8 × 5."""
    onnx = pytest.importorskip("onnx")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    shapes = {"w": (8, 3, 3, 3), "d": (8, 1, 3, 3), "m": (16, 5)}
    weights = [make.make_tensor(name, kind, dims, [0.0] * _count(dims)) for name, dims in shapes.items()]
    nodes = [
        make.make_node("Conv", ["x", "w"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        make.make_node("Conv", ["a", "d"], ["b"], group=8, pads=[1, 1, 1, 1]),
        make.make_node("MatMul", ["b", "m"], ["y"]),
    ]
    entry = make.make_tensor_value_info("x", kind, ["batch", 3, 32, 32])
    graph = make.make_graph(nodes, "small", [entry], [make.make_tensor_value_info("y", kind, None)], weights)
    onnx.save(make.make_model(graph), str(path))


def _count(dims):
    total = 1
    for each in dims:
        total *= each
    return total


def test_multiply_adds_of_a_graph_are_those_counted_by_hand(tmp_path):
    small_graph(tmp_path / "small.onnx")
    by_hand = 16 * 16 * 8 * 3 * 9 + 16 * 16 * 8 * 9 + 8 * 16 * 16 * 5
    assert onnx_macs(tmp_path / "small.onnx") == map_macs(tmp_path / "small.onnx") == by_hand


def test_a_folder_of_maps_remembers_what_one_cost(tmp_path):
    check_method(tmp_path, "spectral", None)
    assert map_macs(tmp_path) == map_macs("spectral") < 2_000_000  # a thousandth of a ViT-Ti
    check_method(tmp_path, "spectral", None)  # more maps of the same kind
    (tmp_path / ABOUT).write_text(json.dumps({"method": "spectral", "prompt": None}))  # as older versions wrote it
    assert map_macs(tmp_path) is None
    check_method(tmp_path, "spectral", None)
    assert map_macs(tmp_path) == map_macs("spectral")


def test_what_is_not_known_is_none(tmp_path):
    assert map_macs("clipseg") is None and map_macs(tmp_path) is None


def test_u2netp_costs_more_than_ten_dense_vit_ti(shared_data):
    assert 10 < onnx_macs(shared_data / "weights" / "u2netp.onnx") / 1.26e9 < 16
