"""Train the built-in models from nothing: `make assets`, or python -m spot.assets.make [RUNS].

Runs the commands of STEPS one after the other in the folder RUNS (runs/assets by default). What is
done is skipped and what was interrupted goes on. After each, the model is written here as float16,
measured on scenes that no training has seen, and the model card README.md is written anew.
"""

import csv
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import spot
from spot import report
from spot.atomic import whole
from spot.data.images import data_for, loader
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate
from spot.models.checkpoints import save_file_whole
from spot.placement.files import fingerprint

HERE = Path(__file__).parent
IMAGES = 1024  # test scenes
PRIORS, BUDGETS = ("isotropic", "center", "uniform"), (9, 16, 36, 64)


@dataclass(frozen=True)
class Step:
    """One command; what it makes is shipped under the name, unless another step goes on from it."""

    name: str
    about: str
    command: str  # {runs} stands for the folder of runs
    shipped: bool = True


NANO = "vit_tiny_patch16_224 --fresh img_size=64 patch_size=8 depth=6 num_heads=4 num_classes=32"

STEPS = (
    Step(
        "scenes-a-grid",
        "learned from labels, on the grid: the plain ViT that scenes-a is compared with",
        f"pretrain {NANO} embed_dim=120 --recipe scenes --set epochs=3",
    ),
    Step(
        "scenes-a",
        "scenes-a-grid, retrofitted with labels",
        "retrofit {runs}/scenes-a-grid/model --recipe scenes-retrofit --set seed=10 epochs=2",
    ),
    Step(
        "scenes-b-grid",
        "another seed and width, learned from labels, on the grid",
        f"pretrain {NANO} embed_dim=104 --recipe scenes --set seed=1 epochs=3.5",
    ),
    Step(
        "scenes-b",
        "scenes-b-grid, retrofitted by distillation, without labels",
        "retrofit {runs}/scenes-b-grid/model --recipe scenes-distil --set seed=11",
    ),
    Step(
        "scenes-mae-encoder",
        "a masked autoencoder's encoder, not shipped",
        f"pretrain {NANO} embed_dim=112 --recipe scenes-mae --set seed=2",
        shipped=False,
    ),
    Step(
        "scenes-mae-grid",
        "scenes-mae-encoder, fine-tuned on the grid with mean pooling, not shipped",
        "finetune {runs}/scenes-mae-encoder/model --recipe scenes-finetune --set seed=12",
        shipped=False,
    ),
    Step(
        "scenes-mae",
        "scenes-mae-grid, retrofitted with labels",
        "retrofit {runs}/scenes-mae-grid/model --recipe scenes-retrofit --set seed=13 epochs=2.5 lr=2e-3",
    ),
)


def main(runs: Path) -> None:
    """Make everything that is not there yet."""
    runs.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        if not (runs / step.name / "model" / "model.safetensors").is_file():
            train(step, runs)
        if step.shipped:
            ship(step, runs)
            write_card(runs)


def train(step: Step, runs: Path) -> None:
    """Run the step's command to its end, noting the commit and the time it began at."""
    note = runs / f"{step.name}.json"
    if not note.is_file():
        began = {"commit": commit(), "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
        with whole(note) as temporary:
            temporary.write_text(json.dumps(began) + "\n")
    words = [*step.command.format(runs=runs).split(), "--data", "scenes", "--val", "scenes"]
    words += ["--checkpoint-minutes", "2", "--out", str(runs / step.name)]
    report.console.print(f"spot {' '.join(words)}", soft_wrap=True)
    code = subprocess.run([sys.executable, "-m", "spot", *words], check=False).returncode
    if code:
        raise SystemExit(f"assets: {step.name} stopped with code {code}; the same command goes on from there")


def commit() -> str:
    """The commit of this checkout."""
    asked = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=12"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def ship(step: Step, runs: Path) -> None:
    """Write the model here as float16, and measure what was written, unless that is done."""
    file, measured = HERE / f"{step.name}.safetensors", runs / f"{step.name}-accuracy.json"
    trained = spot.load(runs / step.name / "model").half().float()
    weights = fingerprint(trained)
    if not file.is_file() or fingerprint(spot.load(file)) != weights:  # the same weights may give other bytes
        save_file_whole(trained, file, dtype=torch.float16)
    if measured.is_file() and json.loads(measured.read_text())["settings"]["weights"] == weights:
        return
    model = spot.load(file)
    settings = [Setting(prior, tokens) for prior in PRIORS for tokens in BUDGETS]
    found = evaluate(model, loader(data_for(model, "scenes", split="test", limit=IMAGES)), settings, title=step.name)
    report.save_json(measured, found.rows(), {"weights": weights})
    report.show(found.rows(), step.name)


def write_card(runs: Path) -> None:
    """Write the model card from the logs and measurements of what is shipped."""
    accuracy, making, commands, logs = [], [], [], []
    for step in STEPS:
        log, note = runs / step.name / "log.csv", runs / f"{step.name}.json"
        if not (runs / step.name / "model").is_dir():
            continue
        epochs = list(csv.DictReader(log.read_text().splitlines()))
        minutes = sum(float(row["seconds"]) for row in epochs) / 60
        about = {"commit": "unknown", "began": "unknown", **(json.loads(note.read_text()) if note.is_file() else {})}
        line: dict[str, Any] = {"model": step.name, "what": step.about, "minutes": round(minutes), **about}
        measured = runs / f"{step.name}-accuracy.json"
        if step.shipped and measured.is_file():
            model = spot.load(HERE / f"{step.name}.safetensors")
            line["parameters"] = f"{sum(each.numel() for each in model.parameters()):,}"
            accuracy += table(step.name, json.loads(measured.read_text())["rows"])
        making.append(line)
        commands.append(f"spot {step.command.format(runs='runs/assets')}")
        logs.append(f"{step.name}\n\n" + report.markdown([curve(row) for row in epochs]))
    options = "--data scenes --val scenes --checkpoint-minutes 2 --out runs/assets/NAME"
    text = CARD.format(
        accuracy=report.markdown(accuracy, digits=1),
        images=IMAGES,
        making=report.markdown(making),
        commands="\n".join(commands),
        options=options,
        logs="\n".join(logs),
    )
    with whole(HERE / "README.md") as temporary:
        temporary.write_text(text)


def table(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Top-1 by prior, a column per budget."""
    return [
        {"model": name, "prior": prior}
        | {f"{row['tokens']} tokens": row["top1"] for row in rows if row["placement"] == prior}
        for prior in PRIORS
    ]


def curve(row: dict[str, str]) -> dict[str, Any]:
    """An epoch's row of the log, as numbers, rounded by the table."""
    wanted = ("epoch", "loss", "train_top1", "val_25", "val_49", "val_64")
    return {name: float(row[name]) for name in wanted if row.get(name)}


CARD = """# The built-in models

Nano ViTs (patch 8 on 64 × 64, 64 grid tokens) for the built-in scenes of 32 classes, as float16 safetensors:
`spot.load("scenes-a")`. This card and the weights are written by `make assets`; nothing in it is typed by hand.

## Accuracy

Top-1 in percent on {images} test scenes that no training has seen, of the float16 weights as shipped. With 64 isotropic
tokens the model reads its grid. The `-grid` models have never seen a token off it.

{accuracy}
## How they were made

Minutes are wall-clock, of one thread on a machine shared with other work.

{making}
Each command is followed by `{options}`:

```
{commands}
```

## Logs

A row per epoch of 8,192 new scenes; val_N is top-1 on 500 validation scenes with N isotropic tokens.

{logs}"""


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        raise SystemExit(__doc__)
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/assets"))
    except (InputError, OSError) as error:
        raise SystemExit(f"assets: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("assets: stopped; what was finished is kept, and the same command goes on") from None
