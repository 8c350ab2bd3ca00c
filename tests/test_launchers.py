"""Under torchrun two processes do together, and say once, what one does alone.

`accelerate launch` does the same on GPUs. On a CPU it starts several processes only through MPI. Starting processes
takes longer than their work here, so all commands run in one launch.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from paper.__main__ import main as paper
from spot.cli import main
from spot.data.images import open_data
from spot.data.loader import loader
from spot.data.picture import evaluation_transform
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate
from spot.models.checkpoints import save_folder
from spot.placement.files import Placements
from spot.processes import this_process
from tests.conftest import make_nano, write_noise
from tests.data.test_shards import write_shards

NANO = ("img_size=64", "patch_size=16", "embed_dim=32", "depth=2", "num_heads=2", "num_classes=32")
SCENES = ("--data", "scenes", "--limit", "10")
COMMANDS = (
    ("spot", "search", "--model", "scenes-a", *SCENES, "--tokens", "9", "--steps", "2", "--batch-size", "4",
     "--out", "OUT/search.safetensors"),
    ("spot", "evaluate", "scenes-b", *SCENES, "--placements", "IN/one/search.safetensors",
     "--json", "OUT/searched.json"),
    ("spot", "evaluate", "scenes-a", "--data", "wds/IN/shards", "--tokens", "9", "--json", "OUT/shards.json"),
    ("spot", "embed", "scenes", "--model", "IN/nano", "--limit", "6", "--tokens", "4", "--workers", "0",
     "--out", "OUT/features.safetensors"),
    ("paper", "transfer", "--model", "IN/nano", "IN/other", "--limit", "40", "--tokens", "4", "9", "--seeds", "2",
     "--workers", "0", "--out", "OUT/paper"),
    ("measure", "IN/images", "OUT/"),
    ("spot", "retrofit", "vit_tiny_patch16_224", "--fresh", *NANO, "--recipe", "scenes-retrofit",
     "--data", "scenes", "--limit", "24", "--val", "scenes", "--val-limit", "9",
     "--set", "batch_size=8", "epochs=1", "budgets=(4,9)", "--out", "OUT/retrofit"),
)  # fmt: skip
PROGRAM = """
import json, sys
from tests.test_launchers import run
for words in json.loads(sys.argv[1]):
    run(*words)
"""
TOLD = ("ACCELERATE_USE_CPU", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(program: str, *words: str) -> None:
    """One of the COMMANDS."""
    if program == "measure":
        measure(*words)
    else:
        (paper if program == "paper" else main)([*words])


def measure(images: str, out: str) -> None:
    """Evaluate a nano on images of which one is unreadable, and is met by one process only: first leave it out."""
    state, model = this_process(), make_nano()
    options = {"transform": evaluation_transform(model.data_config), "classes": 10}
    settings = [Setting("uniform", 4, seed) for seed in (0, 1)]

    def batches(skip):
        data = open_data(images, skip=skip, **options)
        return loader(data, 4, process=state.process_index, processes=state.num_processes)

    found = evaluate(model, batches(True), settings, features=True)
    with pytest.raises(InputError) as problem:
        evaluate(model, batches(False), settings, features=True)
    about = {"rows": found.rows(), "keys": found.keys, "predictions": found.predictions.tolist()}
    about |= {"skipped": found.skipped, "features": [len(each) for each in found.features]}
    about |= {"processes": state.num_processes, "problem": str(problem.value)}
    (Path(out) / f"measured-{state.process_index}.json").write_text(json.dumps(about))


def torchrun(folder: Path, commands: list[list[str]]) -> str:
    """What two processes on the CPU print to stdout; nothing but the launcher tells them of each other."""
    environment = {name: value for name, value in os.environ.items() if name not in TOLD}
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29573")
    (folder / "program.py").write_text(PROGRAM)
    command = [*launcher, str(folder / "program.py"), json.dumps(commands)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> SimpleNamespace:
    """The folders that one process and two together wrote with the same commands, and what the two printed."""
    folder = tmp_path_factory.mktemp("launchers")
    for seed, name in enumerate(("nano", "other")):
        save_folder(make_nano(seed, img_size=64, num_classes=32), folder / name)
    (folder / "shards").mkdir()
    write_shards(folder / "shards")
    write_noise(folder / "images", 23, (40, 40))  # odd, so that the shares of processes are uneven
    (folder / "images" / "3" / "99.png").write_text("not an image")
    commands = {}
    for name in ("one", "two"):
        (folder / name).mkdir()
        text = json.dumps(COMMANDS).replace("OUT/", f"{folder / name}/").replace("IN/", f"{folder}/")
        commands[name] = json.loads(text)
    for words in commands["one"]:
        run(*words)
    return SimpleNamespace(one=folder / "one", two=folder / "two", said=torchrun(folder, commands["two"]))


def read_rows(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def test_a_retrofit_ends_where_one_process_ends(ran):
    assert ran.said.count("The trained model is in") == 1  # two strangers would say it twice
    one, two = ran.one / "retrofit", ran.two / "retrofit"
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    assert max((first[name] - second[name]).abs().max() for name in first) < 1e-4
    (alone,), (together,) = (list(csv.DictReader((folder / "log.csv").open())) for folder in (one, two))
    assert float(alone["loss"]) == pytest.approx(float(together["loss"]), rel=1e-5)
    counted = [name for name in alone if "top1" in name or "val" in name]
    assert [alone[name] for name in counted] == [together[name] for name in counted]


def test_a_search_is_shared_out_and_read_by_evaluate(ran):
    first, second = (Placements.load(folder / "search.safetensors") for folder in (ran.one, ran.two))
    assert list(first.keys) == list(second.keys)
    assert first.trajectory.shape == second.trajectory.shape == (10, 3, 9, 2)
    assert (first.trajectory - second.trajectory).abs().max() < 1e-4


@pytest.mark.parametrize("name, images", [("searched", 10), ("shards", 11)])
def test_evaluate_gives_the_rows_of_one_process(ran, name, images):
    one, two = read_rows(ran.one / f"{name}.json"), read_rows(ran.two / f"{name}.json")
    # A processor may round a product otherwise for a batch of few images, in the loss's seventh digit.
    assert [row.pop("loss") for row in one] == pytest.approx([row.pop("loss") for row in two], rel=1e-5)
    assert one == two and one[0]["images"] == images


@pytest.mark.parametrize("process", [0, 1])
def test_predictions_are_those_of_one_process_and_an_error_of_one_stops_both(ran, process):
    alone, found = (
        json.loads(path.read_text()) for path in (ran.one / "measured-0.json", ran.two / f"measured-{process}.json")
    )
    assert (alone["processes"], found["processes"]) == (1, 2)
    assert found["keys"] == alone["keys"]  # 23 of them, none twice
    assert found["predictions"] == alone["predictions"]
    assert found["skipped"] == ["3/99.png"]
    assert found["features"] == [23, 23]
    assert "3/99.png is not an image" in found["problem"]
    for here, there in zip(alone["rows"], found["rows"], strict=True):
        assert there["loss"] == pytest.approx(here["loss"], abs=1e-6)
        assert {**there, "loss": 0} == {**here, "loss": 0}


def test_features_are_those_of_one_process(ran):
    assert ran.said.count("6 features of 32 numbers") == 1
    one, two = (Placements.load(folder / "features.safetensors") for folder in (ran.one, ran.two))
    assert one.keys == two.keys
    torch.testing.assert_close(one.values["features"], two.values["features"], atol=1e-6, rtol=1e-5)


def test_a_study_finds_what_one_process_finds(ran):
    one, two = (json.loads((folder / "paper" / "transfer.json").read_text()) for folder in (ran.one, ran.two))
    assert one["rows"] == two["rows"] and two["settings"]["processes"] == 2
