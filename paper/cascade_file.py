"""A cascade as one ONNX file with an `If`, against a file per stage: python -m paper.cascade_file FOLDER

FOLDER is what `spot export --cascade` wrote, with two stages. Batch 1, one thread, processor time, both in turns on
noise, once with every image stopping after the first stage and once with none.
"""

import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from paper.program import program
from spot import report
from spot.errors import InputError
from spot.evaluation.throughput import interleaved
from spot.export.runtime import ExportedCascade

WARM_UP = 3  # rounds


def one_file(first: onnx.ModelProto, second: onnx.ModelProto) -> onnx.ModelProto:
    """Stage 1, its confidence, and stage 2 inside an `If`: (images, until) → logits of the last stage that ran."""
    second = onnx.compose.add_prefix(second, "later/")
    logits, later = first.graph.output[0].name, second.graph.output[0].name
    shape = [1, None]
    given = helper.make_node("Identity", [first.graph.input[0].name], [second.graph.input[0].name])
    more = helper.make_graph(
        [given, *second.graph.node],
        "later",
        [],
        [helper.make_tensor_value_info(later, TensorProto.FLOAT, shape)],
        list(second.graph.initializer),
    )
    stop = helper.make_graph(
        [helper.make_node("Identity", [logits], ["kept"])],
        "stop",
        [],
        [helper.make_tensor_value_info("kept", TensorProto.FLOAT, shape)],
    )
    nodes = [
        helper.make_node("Softmax", [logits], ["chances"], axis=1),
        helper.make_node("ReduceMax", ["chances"], ["confidence"], keepdims=0),
        helper.make_node("Less", ["confidence", "until"], ["go_on"]),
        helper.make_node("If", ["go_on"], ["result"], then_branch=more, else_branch=stop),
    ]
    graph = helper.make_graph(
        [*first.graph.node, *nodes],
        "cascade",
        [*first.graph.input, helper.make_tensor_value_info("until", TensorProto.FLOAT, [])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, shape)],
        list(first.graph.initializer),
    )
    made = helper.make_model(graph, opset_imports=list(first.opset_import), functions=[*first.functions])
    made.ir_version = first.ir_version
    return made


def main(folder: Path, rounds: int = 41) -> None:
    """Print the medians, and the ratio of the one file to the files."""
    cascade = ExportedCascade(folder, threads=1)
    if len(cascade.stages) != 2:
        raise InputError(f"a cascade of two stages is needed, {folder} has {len(cascade.stages)}")
    first, second = (onnx.load(folder / stage["file"]) for stage in cascade.stages)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "cascade.onnx"
        onnx.save(one_file(first, second), path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    pixels = np.random.default_rng(0).integers(0, 256, (1, 224, 224, 3), np.uint8)
    both = session.run(None, {name: pixels, "until": np.array(2.0, np.float32)})[0]
    np.testing.assert_allclose(both, cascade.files[-1](pixels)["logits"], atol=1e-4)
    for label, until in (("stop after stage 1", 0.0), ("run both stages", 2.0)):
        whole = {name: pixels, "until": np.array(until, np.float32)}
        calls = {
            "a file per stage": lambda _, until=until: cascade(pixels, until),  # type: ignore[misc]
            "one file": lambda _, whole=whole: session.run(None, whole),  # type: ignore[misc]
        }
        interleaved(calls, torch.zeros(1), WARM_UP)
        times = interleaved(calls, torch.zeros(1), rounds, "processor")
        ratio = median(b / a for a, b in zip(*times.values(), strict=True))
        medians = ", ".join(f"{each} {1000 * median(taken):.1f} ms" for each, taken in times.items())
        report.say(f"{label}: {medians}; one file takes {ratio:.2f} of the time of the files")


if __name__ == "__main__":
    program("paper.cascade_file", main, __doc__)
