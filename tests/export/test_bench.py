"""spot bench, on models small enough to time in no time. No absolute time is asserted."""

import json

import numpy as np
import pytest
from PIL import Image

from spot.cli import main
from spot.evaluation.early_exit import possible_stages, stage_seconds
from spot.export.bench import Timed, bench, onnx_stage, shipped_accuracies, table_rows
from spot.models.cascade import Cascade, Stage
from spot.models.checkpoints import save_folder
from tests.conftest import VIT_TINY, make_nano


@pytest.fixture
def folder(tmp_path):
    save_folder(make_nano(), tmp_path / "nano")
    return str(tmp_path / "nano")


def rows_of(tmp_path, *given):
    main(["bench", *given, "--rounds", "2", "--threads", "1", "--json", str(tmp_path / "out.json")])
    return json.loads((tmp_path / "out.json").read_text())["rows"]


def test_speed_ups_are_medians_of_paired_ratios_and_stand_beside_the_macs():
    dense, few = Timed("vit", "plain", 196, None, 75.0, 86), Timed("vit", "spot", 25, None, 45.0, 10)
    seconds = {
        ("eager", 0): [0.008, 0.010, 0.020],
        ("eager", 1): [0.004, 0.005, 0.020],
        ("onnx", 0): [0.004, 0.004, 0.004],
        ("onnx", 1): [0.001, 0.001, 0.002],
    }
    plain, spot, _, onnx = table_rows([dense, few], seconds, 2)
    assert plain["speed-up"] == 1 and plain["accuracy"] == 75
    assert (spot["low"], spot["speed-up"], spot["high"]) == (1.5, 2, 2)  # of 2, 2, 1
    assert spot["over fastest dense"] == pytest.approx(0.8)  # of 1, 0.8, 0.2
    assert onnx["speed-up"] == onnx["over fastest dense"] == 4
    assert (onnx["ms"], onnx["ms low"], onnx["ms high"]) == (0.5, 0.5, 0.75)  # of a batch of two
    assert onnx["MAC ratio"] == 8.6


METHODS = [("plain", 16), ("spot", 4), ("merged", 4), ("spot", 9), ("merged", 9)]


@pytest.mark.parametrize(  # ONNX at one budget and batch size, because each is a file to export
    "budgets, batches, runtimes", [((4, 9), (1, 2), ("eager",)), ((4,), (2,), ("eager", "onnx"))]
)
def test_every_runtime_runs_the_plain_vit_and_every_method(folder, tmp_path, capsys, budgets, batches, runtimes):
    given = ("--tokens", *budgets, "--batch-size", *batches, "--runtime", *runtimes, "--baseline", "merged")
    rows = rows_of(tmp_path, folder, *map(str, given), "--plot", str(tmp_path / "bench.png"))
    methods = [each for each in METHODS if each[1] in (16, *budgets)]
    assert [(row["batch"], row["method"], row["tokens"], row["runtime"]) for row in rows] == [
        (batch, *each, runtime) for batch in batches for each in methods for runtime in runtimes
    ]
    assert all(row["ms low"] <= row["ms"] <= row["ms high"] and row["speed-up"] > 0 for row in rows)
    few = next(row for row in rows if row["method"] == "spot")
    assert few["MAC ratio"] == pytest.approx(rows[0]["GMACs"] / few["GMACs"])
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "as fast" in " ".join(capsys.readouterr().out.split())


def test_accuracy_is_the_card_s_and_another_timm_model_is_a_row_and_a_point(tmp_path):
    """Without budgets, parts of the grid are timed."""
    known = shipped_accuracies("scenes-a")
    given = ("--batch-size", "1", "--baseline", "plain", "--against", "test_vit=41.5")
    rows = rows_of(tmp_path, "scenes-a", *given, "--plot", str(tmp_path / "bench.png"))
    assert [(row["model"], row["method"], row["tokens"], row["accuracy"]) for row in rows] == [
        ("scenes-a", "plain", 64, known["plain", 64]),
        *(("scenes-a", "spot", tokens, known.get(("spot", tokens))) for tokens in (8, 16, 32, 64)),
        ("test_vit", "timm", None, 41.5),
    ]
    assert known["plain", 64] == known["spot", 64] > known["spot", 16]
    assert (tmp_path / "bench.png").is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "17", "--baseline", "patch-dropout"], "at most the 16 patches"),
        (["--tokens", "0"], "at least 1"),
        (["--rounds", "0"], "at least one round and batches of at least one image"),
        (["--batch-size", "0"], "at least one round and batches of at least one image"),
        (["--device", "abacus"], "'abacus' cannot be used here"),
        (["--prior", "isotopic"], "isotropic"),
        (["vit_tiny_patch16_224"], "different sizes"),
        (["--against", "vit_tiny_patch16_225"], "vit_tiny_patch16_224"),
        (["--against", "test_vit=good"], "NAME=TOP1"),
    ],
)
def test_bad_input_is_one_sentence(folder, given, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", folder, *given, *([] if "--baseline" in given else ["--baseline", "plain"])])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.fixture
def photographs(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize(
    ("threshold", "given", "methods", "stages", "cost"),
    [
        (0.0, ("--runtime", "eager", "onnx"), ["plain", "plain", "cascade", "cascade"], [1.0, 0.0], 10),
        (2.0, ("--tokens", "9"), ["plain", "spot", "cascade"], [1.0, 1.0], 50),
    ],
)
def test_a_cascade_takes_the_stages_that_photographs_need(
    folder, photographs, tmp_path, threshold, given, methods, stages, cost
):
    file = tmp_path / "nano.json"
    Cascade(make_nano(), [Stage(4, 10, threshold), Stage(16, 40)]).save(file)
    words = ("--early-exit", str(photographs), "--cascade", str(file), "--batch-size", "3", "--baseline", "plain")
    rows = rows_of(tmp_path, folder, *words, *given)
    assert [row["method"] for row in rows] == methods
    plain, cascade = rows[0], rows[-1]
    assert cascade["stages"] == stages and cascade["GMACs"] == cost / 1e9 and plain["stages"] == []
    assert cascade["low"] <= cascade["speed-up"] <= cascade["high"]


def test_all_models_of_a_family_and_others_are_on_the_device(shared_data, monkeypatch):
    """No device of its own is needed: tensors on `meta` have no numbers."""

    def called(calls, images, rounds, clock):
        assert {call(images(0)[0]).device.type for call in calls.values()} == {"meta"}
        return {key: [1.0] for key in calls}

    monkeypatch.setattr("spot.export.bench.interleaved", called)
    weights = shared_data / "weights" / f"{VIT_TINY}.safetensors"
    rows = bench(
        ["vit-ti"], tokens=(25,), baselines=("tome-cost",), against=("test_vit",), weights=weights, device="meta"
    )
    assert [row["method"] for row in rows] == ["plain", "spot", "tome-cost", "timm"]


def test_stages_are_timed_as_files():
    candidates = possible_stages(make_nano(), (4,), merge=False)
    seconds = stage_seconds(candidates, onnx_stage)
    assert list(seconds) == [(4, ()), (16, ())] and all(each > 0 for each in seconds.values())
