"""Runtimes timed in turns."""

import json

import pytest

from spot.cli import main
from spot.export.bench import ratio, table_rows
from spot.models.checkpoints import save_folder
from tests.conftest import make_nano


def test_speed_ups_are_medians_of_paired_ratios_and_stand_beside_the_macs():
    seconds = {
        ("eager", 0): [0.008, 0.010, 0.020],
        ("eager", 25): [0.004, 0.005, 0.020],
        ("onnx", 0): [0.004, 0.004, 0.004],
        ("onnx", 25): [0.001, 0.001, 0.002],
    }
    plain, spot, _, onnx = table_rows(seconds, {0: 86.0, 25: 10.0}, 1, 2)
    assert plain["speed-up"] == 1 and plain["method"] == "plain"
    assert spot["speed-up"] == 2  # of 2, 2, 1
    assert spot["over fastest dense"] == pytest.approx(0.8)  # of 1, 0.8, 0.2
    assert onnx["speed-up"] == onnx["over fastest dense"] == 4
    assert onnx["ms"] == 0.5  # of a batch of two
    assert onnx["MAC ratio"] == 8.6
    assert ratio([1, 2, 9], [1, 1, 1]) == 2


def test_every_runtime_runs_the_plain_vit_and_every_budget(tmp_path):
    model = make_nano()
    save_folder(model, tmp_path / "model")
    command = ["bench", str(tmp_path / "model"), "--runtime", "eager", "onnx", "onnx-int8", "--batch-size", "1"]
    main([*command, "--tokens", "4", "9", "--rounds", "2", "--threads", "1", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["runtime"], row["tokens"]) for row in rows] == [
        (runtime, tokens) for runtime in ("eager", "onnx", "onnx-int8") for tokens in (None, 4, 9)
    ]
    assert all(row["ms"] > 0 and row["speed-up"] > 0 for row in rows)
    small, large = (row["MAC ratio"] for row in rows[1:3])
    assert small > large > 1


@pytest.mark.parametrize("wrong", [("--rounds", "0"), ("--batch-size", "0")])
def test_no_rounds_and_no_images_are_refused(tmp_path, capsys, wrong):
    save_folder(make_nano(), tmp_path / "model")
    with pytest.raises(SystemExit):
        main(["bench", str(tmp_path / "model"), "--runtime", "eager", "--tokens", "4", *wrong])
    assert "at least one round and batches of at least one image" in capsys.readouterr().err


def test_a_model_whose_windows_have_a_scale_is_timed_with_its_own_placement(tmp_path):
    """As shipped retrofits have: fewer tokens come with a third column, the whole grid without."""
    model = make_nano()
    model.scale = "auto"
    save_folder(model, tmp_path / "model")
    command = [
        "bench",
        str(tmp_path / "model"),
        "--runtime",
        "eager",
        "onnx",
        "--batch-size",
        "2",
        "--tokens",
        "4",
        "16",
    ]
    main([*command, "--batch-size", "2", "--rounds", "1", "--threads", "1", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [None, 4, 16, None, 4, 16]
