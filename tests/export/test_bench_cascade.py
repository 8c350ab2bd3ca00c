"""Early exit timed on photographs: each takes as many stages as it needs."""

import json

import numpy as np
import pytest
from PIL import Image

from spot.cli import main
from spot.errors import InputError
from spot.evaluation.early_exit import possible_stages
from spot.export.bench_cascade import bench_cascade, onnx_stage_seconds
from spot.models.cascade import Cascade, Stage
from spot.models.checkpoints import save_folder
from tests.conftest import make_nano


@pytest.fixture
def nano_files(tmp_path):
    """A model, a cascade of it that stops every image at its first stage, and five photographs."""
    model = make_nano()
    save_folder(model, tmp_path / "nano")
    Cascade(model, [Stage(4, 10, 0.0), Stage(16, 40)]).save(tmp_path / "nano.json")
    (tmp_path / "photos").mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path


def test_stages_and_multiply_adds_are_those_of_the_photographs(nano_files):
    rows = bench_cascade(str(nano_files / "nano"), nano_files / "photos", file=nano_files / "nano.json", rounds=2)
    plain, cascade = rows
    assert (plain["method"], cascade["method"]) == ("plain", "cascade") and plain["time"] == plain["mean time"] == 1
    assert cascade["stages"] == [1.0, 0.0] and cascade["GMACs"] == 10 / 1e9 and cascade["photographs"] == 5
    assert cascade["time low"] <= cascade["time"] <= cascade["time high"]


def test_a_threshold_above_one_runs_every_stage(nano_files):
    Cascade(make_nano(), [Stage(4, 10, 2.0), Stage(16, 40)]).save(nano_files / "all.json")
    where = str(nano_files / "nano"), nano_files / "photos"
    _, cascade = bench_cascade(*where, file=nano_files / "all.json", rounds=2, batch_sizes=(3,))
    assert cascade["stages"] == [1.0, 1.0] and cascade["GMACs"] == 50 / 1e9 and cascade["batch"] == 3


def test_the_command_writes_the_table(nano_files, capsys):
    call = ["bench", str(nano_files / "nano"), "--early-exit", str(nano_files / "photos"), "--rounds", "1"]
    call += ["--cascade", str(nano_files / "nano.json"), "--batch-size", "1", "--json", str(nano_files / "t.json")]
    main(call)
    assert "5 in all" in capsys.readouterr().out
    assert [row["method"] for row in json.loads((nano_files / "t.json").read_text())["rows"]] == ["plain", "cascade"]


def test_a_folder_without_photographs_is_refused(nano_files):
    (nano_files / "none").mkdir()
    with pytest.raises(InputError, match="photographs were expected"):
        bench_cascade(str(nano_files / "nano"), nano_files / "none", file=nano_files / "nano.json")


def test_stages_are_timed_as_files():
    candidates = possible_stages(make_nano(), (4,), merge=False)
    seconds = onnx_stage_seconds(candidates)
    assert list(seconds) == [(4, ()), (16, ())] and all(each > 0 for each in seconds.values())
