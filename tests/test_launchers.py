"""Under torchrun two processes do together, and say once, what one does alone.

`accelerate launch` does the same on GPUs. On a CPU it starts several processes only through MPI.
"""

import csv
import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from spot.cli import main
from spot.placement.files import Placements

SEARCH = (
    *("search", "--model", "scenes-a", "--data", "scenes", "--limit", "10"),
    *("--tokens", "9", "--steps", "2", "--batch-size", "4"),
)
NANO = ("img_size=64", "patch_size=16", "embed_dim=32", "depth=2", "num_heads=2", "num_classes=32")
RETROFIT = (
    *("retrofit", "vit_tiny_patch16_224", "--fresh", *NANO, "--recipe", "scenes-retrofit"),
    *("--data", "scenes", "--limit", "24", "--val", "scenes", "--val-limit", "9"),
    *("--set", "batch_size=8", "epochs=1", "budgets=(4,9)"),
)
TOLD = ("ACCELERATE_USE_CPU", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun(*words: object) -> str:
    """What two processes on the CPU print to stdout; nothing but the launcher tells them of each other."""
    environment = {name: value for name, value in os.environ.items() if name not in TOLD}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29573")
    command = [*launcher, "-m", "spot", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_retrofit_by_torchrun_ends_where_one_process_ends(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    main([*RETROFIT, "--out", str(one)])
    said = torchrun(*RETROFIT, "--out", two)
    assert said.count("The trained model is in") == 1  # two strangers would say it twice
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    assert max((first[name] - second[name]).abs().max() for name in first) < 1e-4
    (alone,), (together,) = (list(csv.DictReader((folder / "log.csv").open())) for folder in (one, two))
    assert float(alone["loss"]) == pytest.approx(float(together["loss"]), rel=1e-5)
    counted = [name for name in alone if "top1" in name or "val" in name]
    assert [alone[name] for name in counted] == [together[name] for name in counted]


def test_a_search_by_torchrun_is_shared_out_and_read_by_evaluate(tmp_path):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    main([*SEARCH, "--out", str(one)])
    torchrun(*SEARCH, "--out", two)
    first, second = Placements.load(one), Placements.load(two)
    assert list(first.keys) == list(second.keys)
    assert first.trajectory.shape == second.trajectory.shape == (10, 3, 9, 2)
    assert (first.trajectory - second.trajectory).abs().max() < 1e-4

    rows = []
    for name, run in (("alone", lambda *words: main(list(words))), ("together", torchrun)):
        table = tmp_path / f"{name}.json"
        evaluation = ("evaluate", "scenes-b", "--data", "scenes", "--limit", "10", "--placements", str(one))
        run(*evaluation, "--json", str(table))
        rows.append(json.loads(table.read_text())["rows"])
    assert rows[0] == rows[1]
