"""A cascade in one ONNX file: the second stage runs only where the first one is not sure."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnxruntime")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from paper.cascade_file import one_file  # noqa: E402


def stage(matrix):
    """images (1, 2) → logits (1, 2), by a matrix product."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["images", "weight"], ["logits"])],
        "stage",
        [value("images", TensorProto.FLOAT, [1, 2])],
        [value("logits", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(np.array(matrix, np.float32), "weight")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_the_second_stage_runs_only_where_the_first_is_not_sure():
    made = one_file(stage([[1, 0], [0, 1]]), stage([[0, 5], [5, 0]]))
    onnx.checker.check_model(made)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for images, expected in (([[4.0, 0.0]], [[4.0, 0.0]]), ([[0.5, 0.0]], [[0.0, 2.5]])):  # confidence 0.98, 0.62
        given = {"images": np.array(images, np.float32), "until": np.array(0.9, np.float32)}
        np.testing.assert_allclose(session.run(None, given)[0], expected)
