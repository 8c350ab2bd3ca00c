import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import spot
from spot.errors import InputError
from spot.hashes import hash_model
from spot.options import TrainOptions
from spot.training.loop import Stopping, count_steps
from spot.training.recipes import RECIPES
from spot.training.run import run
from tests.conftest import make_nano
from tests.training.small_run import interrupted_after, make_images, small_recipe, small_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_images(tmp_path_factory.mktemp("images") / "all")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("scenes")])
def test_every_recipe_learns_and_leaves_a_model_log_and_plot(name, data, tmp_path):
    options = {"checkpoint_minutes": 60.0, "val": str(data)}
    changes = {"epochs": 3.0, "mixup": 0.0, "cutmix": 0.0, "randaug": None, "lr": 3e-3, "crop_scale": (0.9, 1.0)}
    small_run(name, data, tmp_path / "run", options, **changes)
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").open()))
    assert len(rows) == 3
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert (tmp_path / "run" / "log.png").stat().st_size > 1000
    assert spot.load(tmp_path / "run" / "model").num_classes == 10
    assert ("val_16" in rows[-1]) == (name != "mae-in1k")  # whose model has no classes


@pytest.mark.parametrize("name", ["distil", "mae-in1k"])
def test_stopped_and_resumed_is_bit_identical(name, data, tmp_path, monkeypatch):
    """tests/faults does the same with a supervised run that is killed."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    small_run(name, data, whole)
    with interrupted_after(5, monkeypatch):
        small_run(name, data, cut)
    assert not (cut / "model").exists()
    newest = cut / "checkpoints" / "00000005.pt"
    newest.write_bytes(newest.read_bytes()[:1000])  # a disk may lose the end of a file
    small_run(name, data, cut)
    assert same_weights(whole, cut)
    logs = [
        [(int(row["step"]), row["loss"]) for row in csv.DictReader((run / "log.csv").open())] for run in (whole, cut)
    ]
    assert logs[0] == logs[1]
    assert [step for step, _ in logs[0]] == [4, 8, 11]  # images 30 and 60 pass there, and the end


def test_accumulated_parts_are_the_whole_batch(data, tmp_path):
    changes = {"mix_share": 0.0, "epochs": 1.0, "drop_path": 0.0}
    small_run("distil", data, tmp_path / "one", **changes)
    small_run("distil", data, tmp_path / "four", {"accumulate": 4}, **changes)
    first, second = weights(tmp_path / "one"), weights(tmp_path / "four")
    assert max((first[name] - second[name]).abs().max() for name in first) < 1e-4


def test_bfloat16_trains_about_as_float32_and_float16_is_refused_on_a_cpu(data, tmp_path):
    losses = []
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state()  # accelerate keeps the first precision of a process
        small_run("distil", data, tmp_path / precision, precision=precision, epochs=1.0)
        losses.append(float(list(csv.DictReader((tmp_path / precision / "log.csv").open()))[-1]["loss"]))
    AcceleratorState._reset_state()
    assert losses[0] != losses[1]  # or nothing was rounded
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    with pytest.raises(InputError, match="fp16 needs an accelerator"):
        small_run("distil", data, tmp_path / "fp16", precision="fp16", epochs=1.0)
    assert not (tmp_path / "fp16" / "run.json").exists()


def test_a_loss_that_is_no_number_stops_with_where_it_happened(data, tmp_path):
    with pytest.raises(InputError, match=re.escape("the supervised loss became nan at step")) as caught:
        small_run("cls-in1k", data, tmp_path / "run", lr=1e30, clip_grad=None)
    assert "rate" in str(caught.value)
    assert not (tmp_path / "run" / "model").exists()


def test_the_average_stays_nearer_to_the_start_than_the_weights(data, tmp_path):
    start, moved, averaged = (
        model.state_dict()
        for model in (
            make_nano(),
            small_run("distil", data, tmp_path / "a", epochs=1.0, ema=0.0),
            small_run("distil", data, tmp_path / "b", epochs=1.0, ema=0.9),
        )
    )
    for name in ("vit.pos_embed", "vit.blocks.0.attn.qkv.weight"):
        assert 0 < (averaged[name] - start[name]).norm() < 0.9 * (moved[name] - start[name]).norm()


def test_a_finished_run_is_kept_and_its_folder_is_refused_to_another_run(data, tmp_path):
    recipe, options = small_recipe("distil", epochs=0.3), TrainOptions(data=str(data), out=tmp_path / "run")
    first = run(make_nano(), recipe, options)
    again = run(make_nano(), replace(recipe, origin="what a later version says"), options)
    assert hash_model(first) == hash_model(again)
    files = sorted((file, file.stat().st_mtime_ns) for file in options.out.rglob("*"))
    with pytest.raises(InputError, match=re.escape("made with recipe.lr=0.001, now recipe.lr=0.01")):
        run(make_nano(), replace(recipe, lr=1e-2), options)
    with pytest.raises(InputError, match="teacher"):
        run(make_nano(), recipe, options, make_nano(seed=1))
    assert files == sorted((file, file.stat().st_mtime_ns) for file in options.out.rglob("*"))


def test_steps_count_images():
    assert count_steps(small_recipe("distil", warmup_epochs=1), 30) == (11, 4)  # 3 epochs, batch 8: 90 / 8; 30 / 8
    assert count_steps(small_recipe("distil", epochs=0.01), 30) == (1, 0)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"options": {"accumulate": 3}}, "batch of 8 does not divide into 3 parts"),
        ({"batch_size": 64}, "one batch, but there are 30; use a smaller batch, such as --set batch_size=14"),
        ({"warmup_epochs": 3.0}, "warms up for 11 steps, but the run has 11, so it would never learn at its full rate"),
    ],
)
def test_a_recipe_that_does_not_fit_the_data_says_so(changes, sentence, data, tmp_path):
    with pytest.raises(InputError, match=re.escape(sentence)):
        small_run("distil", data, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_ctrl_c_leaves_a_checkpoint_and_says_from_where_the_run_goes_on(data, tmp_path):
    out = tmp_path / "run"
    arguments = {"name": "cls-in1k", "data": data, "out": out, "options": {"workers": 1}, "epochs": 300.0}
    command = [sys.executable, "-m", "tests.training.small_run", json.dumps(arguments, default=str)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not any(int(file.stem) >= 3 for file in (out / "checkpoints").glob("[0-9]*.pt")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: also to the workers
    said = process.communicate(timeout=300)[1]
    assert "Ctrl-C again stops at once" in said
    step = int(re.search(r"KeyboardInterrupt: stopped; the same command resumes from step (\d+) of 1125", said)[1])
    assert step == max(int(file.stem) for file in (out / "checkpoints").glob("[0-9]*.pt"))


def test_a_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with Stopping(shown=False) as stopping:
        signal.raise_signal(signal.SIGINT)
        assert stopping.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_memory_does_not_grow_with_steps(data, tmp_path):
    import resource

    small_run("distil", data, tmp_path / "warm", epochs=2.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    small_run("distil", data, tmp_path / "long", {"checkpoint_minutes": 60.0}, epochs=12.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # kB, over 45 steps


def test_the_average_follows_the_weights_from_the_first_steps(data, tmp_path):
    trained = small_run("distil", data, tmp_path / "run", ema=0.9999)
    assert (trained.vit.blocks[0].attn.qkv.weight - make_nano().vit.blocks[0].attn.qkv.weight).abs().max() > 1e-3


def test_gradients_are_clipped(data, tmp_path):
    changes = {"optimizer": "adamw", "ema": 0.0, "weight_decay": 0.0, "blend": 1.0}
    moved = {}
    for clip in (None, 1e-9):
        trained = small_run("distil", data, tmp_path / str(clip), clip_grad=clip, **changes)
        start = make_nano().vit.blocks[0].attn.qkv.weight
        moved[clip] = (trained.vit.blocks[0].attn.qkv.weight - start).abs().max()
    assert moved[1e-9] < 0.5 * moved[None]


def test_the_logged_loss_does_not_depend_on_accumulation_and_a_run_keeps_its_own(data, tmp_path):
    changes, logs = {"mix_share": 0.0, "epochs": 1.0, "drop_path": 0.0}, []
    for count in (1, 4):
        out = tmp_path / str(count)
        small_run("distil", data, out, {"accumulate": count}, **changes)
        logs.append([float(row["loss"]) for row in csv.DictReader((out / "log.csv").open())])
    assert logs[1] == pytest.approx(logs[0], rel=1e-3)
    with pytest.raises(InputError, match="accumulate"):
        small_run("distil", data, tmp_path / "1", {"accumulate": 2}, **changes)


def test_a_checkpoint_of_another_run_is_named(data, tmp_path, monkeypatch):
    with interrupted_after(2, monkeypatch):
        small_run("distil", data, tmp_path / "run")
    torch.save({"progress": {}}, tmp_path / "run" / "checkpoints" / "00000003.pt")
    with pytest.raises(InputError, match=r"newest checkpoint in .*run is not one of this run .* delete it"):
        small_run("distil", data, tmp_path / "run")
