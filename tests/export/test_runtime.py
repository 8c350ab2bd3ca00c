"""Running an exported file: without torch, with the pixels that the model was evaluated on."""

import json
import resource
import subprocess
import sys

import numpy as np
import onnx
import pytest
from PIL import Image

from spot.cli import main
from spot.data.picture import resize_and_crop
from spot.errors import InputError
from spot.export.runtime import Exported, probabilities

SECONDS = 2  # a third of it where nothing else runs; importing torch takes as long again


def photo(path, size=(60, 40)):
    Image.effect_noise(size, 80).convert("RGB").save(path)
    return path


def test_probabilities_add_up_to_one():
    shares = probabilities(np.array([[0.0, np.log(3.0)], [1000.0, 0.0]]))
    np.testing.assert_allclose(shares, [[0.25, 0.75], [1, 0]])


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torchvision", "timm", "matplotlib", "onnx"}:
            raise ImportError("no " + name + " here")
sys.meta_path.insert(0, Blocked())
from spot.cli import main
main(sys.argv[1:])
"""


def test_prediction_needs_no_torch_and_starts_within_a_second(exported, tmp_path):
    image = photo(tmp_path / "photo.jpg")
    command = [sys.executable, "-c", BLOCKED, "predict", "--runtime", "onnx", str(exported.path), str(image)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert "class " in result.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 5
    pixels = np.asarray(resize_and_crop(Image.open(image), (32, 32)))[None]
    shares = probabilities(Exported(exported.path)(pixels)["logits"][0]) * 100
    assert rows[0]["index"] == int(shares.argmax())
    assert rows[0]["probability"] == pytest.approx(shares.max())
    # Processor time, which other programs disturb little.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["predict", "--runtime", "onnx", *map(str, arguments)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_bad_input_is_one_sentence(exported, tmp_path, capsys):
    image = photo(tmp_path / "photo.jpg")
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Abs", ["x"], ["y"])], "another", [value], [result])
    opset = [onnx.helper.make_opsetid("", 20)]
    onnx.save_model(onnx.helper.make_model(graph, ir_version=10, opset_imports=opset), tmp_path / "foreign.onnx")
    (tmp_path / "broken.onnx").write_bytes(exported.path.read_bytes()[:1000])
    assert "was not written by spot export" in refused(capsys, tmp_path / "foreign.onnx", image)
    assert "cannot open" in refused(capsys, tmp_path / "broken.onnx", image)
    assert "is missing" in refused(capsys, tmp_path / "none.onnx", image)
    assert "name at least one image" in refused(capsys, exported.path)
    assert "is missing" in refused(capsys, exported.path, tmp_path / "none.jpg")


@pytest.mark.parametrize(
    "images, positions, sentence",
    [
        (np.zeros((1, 32, 32, 3), np.uint8), np.zeros((1, 1, 2)), "takes 2 to 256 tokens, got 1"),
        (np.zeros((1, 32, 32, 3), np.uint8), np.zeros((1, 257, 2)), "takes 2 to 256 tokens, got 257"),
        (np.zeros((1, 32, 32, 3), np.uint8), np.zeros((2, 5, 2)), r"shape \(1, N, 2\), got \(2, 5, 2\)"),
        (np.zeros((1, 32, 32, 3), np.uint8), np.full((1, 5, 2), np.nan), "must be finite"),
        (np.zeros((1, 32, 32, 3), np.uint8), np.ones((1, 5, 3)), "export it with --sizes"),
        (np.zeros((1, 32, 32, 3), np.float32), None, r"uint8 of shape \(B, H, W, 3\), got float32"),
        (np.zeros((32, 32, 3), np.uint8), None, r"got uint8 \(32, 32, 3\)"),
    ],
)
def test_wrong_arrays_are_refused(exported, images, positions, sentence):
    with pytest.raises(InputError, match=sentence):
        Exported(exported.path)(images, positions)
