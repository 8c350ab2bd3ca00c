"""Train the built-in models from nothing: `make assets`, or python -m tools.make_assets.

Runs the commands of CARDS in the folder --runs. Finished commands are skipped, and interrupted ones resume. After each
command the model is written to spot/assets as float16 and measured on scenes that were not used for training, and the
model card is written.
"""

import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import spot
from paper.program import program
from paper.provenance import comment
from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.evaluation.accuracy import Setting, evaluate
from spot.hashes import hash_model
from spot.models.checkpoints import save_model
from spot.models.family import Family, Source, at_budget
from spot.models.shipped import ALIASES
from spot.store import read_json, write_json, write_text

ASSETS = Path(__file__).parents[1] / "spot" / "assets"


@dataclass(frozen=True)
class Step:
    """One command of spot, and the name of its model."""

    name: str
    about: str
    command: str  # {runs} stands for the folder of runs; recipes are those of tools/recipes.py too
    shipped: bool = True
    data: str = "scenes"


NANO = "vit_tiny_patch16_224 --fresh img_size=64 patch_size=8 depth=6 num_heads=4 num_classes=32"
NEEDLE = (
    "vit_small_patch16_rope_224 --fresh img_size=192 patch_size=8 embed_dim=128 depth=6 num_heads=4 init_values=1.0 "
    "num_classes=32"
)

STEPS = (
    Step(
        "scenes-a-grid",
        "trained with labels on the grid: the plain ViT for comparisons with scenes-a",
        f"pretrain {NANO} embed_dim=120 --recipe scenes --set epochs=3",
    ),
    Step(
        "scenes-a",
        "scenes-a-grid, retrofitted with labels",
        "retrofit {runs}/scenes-a-grid/model --recipe scenes-retrofit --set seed=10 epochs=2",
    ),
    Step(
        "scenes-b-grid",
        "another seed and width, trained with labels on the grid",
        f"pretrain {NANO} embed_dim=104 --recipe scenes --set seed=1 epochs=3.5",
    ),
    Step(
        "scenes-b",
        "scenes-b-grid, retrofitted by distillation, without labels",
        "retrofit {runs}/scenes-b-grid/model --recipe scenes-distil --set seed=11",
    ),
    Step(
        "scenes-mae-encoder",
        "the encoder of a masked autoencoder; not in the package",
        f"pretrain {NANO} embed_dim=112 --recipe scenes-mae --set seed=2",
        shipped=False,
    ),
    Step(
        "scenes-mae-grid",
        "scenes-mae-encoder, fine-tuned on the grid with mean pooling; not in the package",
        "finetune {runs}/scenes-mae-encoder/model --recipe scenes-finetune --set seed=12",
        shipped=False,
    ),
    Step(
        "scenes-mae",
        "scenes-mae-grid, retrofitted with labels",
        "retrofit {runs}/scenes-mae-grid/model --recipe scenes-retrofit --set seed=13 epochs=2.5 lr=2e-3",
    ),
)


NEEDLE_STEPS = (
    Step(
        "scenes-needle-crops",
        "trained with labels on crops of 64 pixels, with few tokens; not in the package",
        f"pretrain {NEEDLE} --recipe scenes-needle-crops",
        shipped=False,
        data="needle:64",
    ),
    Step(
        "scenes-needle-whole",
        "scenes-needle-crops, trained on whole pictures with few tokens and with the grid; not in the package",
        "retrofit {runs}/scenes-needle-crops/model --recipe scenes-needle",
        shipped=False,
        data="needle",
    ),
    Step(
        "scenes-needle",
        "scenes-needle-whole, trained further with a decreasing learning rate",
        "retrofit {runs}/scenes-needle-whole/model --recipe scenes-needle --set epochs=0.2 lr=6e-4 warmup_epochs=0.01 "
        "seed=1",
        data="needle",
    ),
)


@dataclass(frozen=True)
class Card:
    """A model card: its file, its introduction, the steps that make its models, and how these are measured."""

    file: str
    words: str
    steps: Sequence[Step]
    data: str
    images: int  # test scenes
    priors: Sequence[str]
    budgets: Sequence[int]


def main(runs: Path = Path("runs/assets")) -> None:
    """Make the models that do not exist yet: those for scenes, and the one for scenes of the setting needle."""
    runs.mkdir(parents=True, exist_ok=True)
    for card in CARDS:
        for number, step in enumerate(card.steps, 1):
            if not (runs / step.name / "model" / "model.safetensors").is_file():
                words = [*step.command.format(runs=runs).split(), "--data", step.data, "--val", step.data]
                call(*words, "--checkpoint-minutes", "2", "--out", runs / step.name, program="tools.recipes")
            if step.shipped:
                ship(runs / step.name / "model", ASSETS / f"{step.name}.safetensors")
                write_card(card, card.steps[:number], runs)


def record(path: Path, name: str, accuracy: Mapping[int, float], data: str, base: str = "") -> None:
    """Write a model's measured accuracy, top-1 in percent by number of tokens, to the list of models."""
    known = read_json(path, "the list of models") if path.is_file() else {}
    alias = next((alias for alias, full in ALIASES.items() if full == name), "")
    row = {"alias": alias, "base": base or None, "data": data}
    known[name] = {**known.get(name, {}), **row, "accuracy": {str(tokens): top1 for tokens, top1 in accuracy.items()}}
    write_json(path, known)


def call(*words: object, program: str = "spot") -> None:
    """Run a verb of spot to its end, in a process of its own."""
    command = ["-m", program, *map(str, words)]
    report.console.print(f"python {' '.join(command)}", soft_wrap=True)
    if code := subprocess.run([sys.executable, *command], check=False).returncode:
        raise SystemExit(f"spot {words[0]} stopped with code {code}; the same command goes on from there")


def ship(trained: Path, file: Path) -> None:
    """Write a trained model as float16, unless that is done: the same weights may give other bytes."""
    model = spot.load(trained).half().float()
    if not file.is_file() or hash_model(spot.load(file)) != hash_model(model):
        save_model(model, file, dtype=torch.float16)


def measured(model: Source, file: Path, settings: Sequence[Setting], data: str, **options: Any) -> list[dict[str, Any]]:
    """Accuracy of a model's weights on data (with data_for's options), measured once and kept in the file."""
    known = read_json(file) if file.is_file() else {}
    weights = model.hash if isinstance(model, Family) else hash_model(model)
    if weights not in known:
        images = loader(data_for(at_budget(model), data, **options))
        known[weights] = evaluate(model, images, settings, title=model.name).rows()
        write_json(file, known)
    return known[weights]


def write_card(card: Card, steps: Sequence[Step], runs: Path) -> None:
    """Write the model card from the logs of these steps and the accuracy of their models."""
    accuracy, making, commands, logs = [], [], [], []
    settings = [Setting(prior, tokens) for prior in card.priors for tokens in card.budgets]
    for step in steps:
        epochs = epochs_of(runs / step.name)
        minutes = sum(float(row["seconds"]) for row in epochs) / 60
        line: dict[str, Any] = {"model": step.name, "what": step.about, "minutes": round(minutes) if epochs else None}
        if step.shipped:
            model = spot.load(ASSETS / f"{step.name}.safetensors")
            line["parameters"] = f"{sum(each.numel() for each in model.parameters()):,}"
            file = runs / f"accuracy-{card.images}.json"
            rows = measured(model, file, settings, card.data, split="test", limit=card.images)
            accuracy += table(step.name, rows, card.priors)
            top1 = {row["tokens"]: row["top1"] for row in rows if row["placement"] == "isotropic"}
            record(ASSETS / "models.json", step.name, top1, "scenes")
        making.append(line)
        command = step.command.format(runs="runs/assets")
        commands.append(f"python -m tools.recipes {command} --data {step.data} --val {step.data}")
        logs += [f"{step.name}\n\n" + report.markdown([curve(row) for row in epochs])] if epochs else []
    options = "--checkpoint-minutes 2 --out runs/assets/NAME"
    text = CARD.format(
        words=card.words.format(images=card.images),
        files=comment({step.name: ASSETS / f"{step.name}.safetensors" for step in steps if step.shipped}),
        accuracy=report.markdown(accuracy, digits=1),
        making=report.markdown(making),
        commands="\n".join(commands),
        options=options,
        logs="\n".join(logs),
    )
    write_text(ASSETS / card.file, text)


def epochs_of(run: Path) -> list[dict[str, str]]:
    """The rows of a run's log, which a run that was stopped in its first epoch does not have."""
    log = run / "log.csv"
    return list(csv.DictReader(log.read_text().splitlines())) if log.is_file() else []


def table(name: str, rows: list[dict[str, Any]], priors: Sequence[str]) -> list[dict[str, Any]]:
    """Top-1 by prior, a column per budget."""
    return [
        {"model": name, "prior": prior}
        | {f"{row['tokens']} tokens": row["top1"] for row in rows if row["placement"] == prior}
        for prior in priors
    ]


def curve(row: dict[str, str]) -> dict[str, Any]:
    """An epoch's row of the log, as numbers, rounded by the table."""
    wanted = ("epoch", "loss", "train_top1", "val_25", "val_49", "val_64", "val_100", "val_576")
    return {name: float(row[name]) for name in wanted if row.get(name)}


SCENES = """# The built-in models

These are nano ViTs for the built-in *scenes*: images of 64 × 64 pixels with objects of 32 classes.
Patches have 8 × 8 pixels, so the grid has 64 tokens. `spot.load("scenes-a")` loads a model. The
weights are stored as float16 safetensors. `make assets` trains the models and writes this card.

## Accuracy

The table shows top-1 in percent on {images} test scenes that were not used for training, with the
float16 weights of the package. 64 isotropic tokens are the grid. The `-grid` models were trained on
the grid only."""

NEEDLE_CARD = """# The built-in model for a small object in a large picture

`spot.load("scenes-needle")` loads a nano ViT for the built-in scenes `needle`. These contain one
object of 24 to 40 pixels among clutter, of one of 32 classes. The model has rotary positions and
patches of 8 × 8 pixels. An image of 192 × 192 pixels has 576 grid tokens, and other sizes work.

`scenes-needle.policy.safetensors` is the model's policy, a network that places its tokens. It was
trained by `spot learn` on 512 training scenes without labels. The header of the file contains the
settings. `make assets` trains the models and writes this card.

## Accuracy

The table shows top-1 in percent on {images} test scenes that were not used for training, with the
float16 weights of the package. 576 isotropic tokens are the grid. `python -m paper needle` measures
other placements."""

CARDS = (
    Card("README.md", SCENES, STEPS, "scenes", 1024, ("isotropic", "center", "uniform"), (9, 16, 36, 64)),
    Card("NEEDLE.md", NEEDLE_CARD, NEEDLE_STEPS, "needle", 256, ("isotropic",), (64, 576)),
)

CARD = """{words}

{files}

{accuracy}
## How they were made

*Minutes* are wall-clock time of one thread, on a machine with other programs.

{making}
Each command is followed by `{options}`:

```
{commands}
```

## Logs

Each row is an epoch of 8,192 new scenes. *val_N* is top-1 on validation scenes with N isotropic
tokens.

{logs}"""


if __name__ == "__main__":
    program("tools.make_assets", main)
