"""The folder of a training run: what it was asked for, its log, and checkpoints to go on from.

    run.json                the recipe and everything else that decides the outcome
    log.csv, log.png        a row per epoch, and the paper's retrofit plot
    checkpoints/STEP.pt     the last two; each is written whole or not at all
    model/                  the outcome, for spot.load

The same command in the same folder goes on where it stopped. A folder that holds anything else
is left alone.
"""

import csv
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spot import report
from spot.errors import InputError
from spot.store import whole

KEPT = 2


class RunFolder:
    """Open a run's folder: new or empty, or the same run's."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(folder)
        settings = json.loads(json.dumps(settings))
        self.settings = settings
        file = self.path / "run.json"
        if file.is_file():
            refuse_other(json.loads(file.read_text())["settings"], settings, self.path)
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InputError(f"{self.path} holds something that is not a training run; choose another --out")

    def begin(self) -> None:
        """Write down what the run was asked for."""
        if not (self.path / "run.json").is_file():
            with whole(self.path / "run.json") as temporary:
                data = {"settings": self.settings, "versions": report.versions()}
                temporary.write_text(json.dumps(data, indent=2) + "\n")

    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, newest first."""
        return sorted((self.path / "checkpoints").glob("[0-9]*.pt"), reverse=True)

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        """Write a checkpoint, then let the oldest go."""
        file = self.path / "checkpoints" / f"{step:08d}.pt"
        with whole(file) as temporary:
            torch.save(dict(state), temporary)
        for old in self.checkpoints()[KEPT:]:
            old.unlink(missing_ok=True)
        return file

    def load(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, or None."""
        for file in self.checkpoints():
            try:
                return torch.load(file, map_location="cpu", weights_only=True)
            except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
                report.errors.print(f"{file.name} is damaged; going on from the one before", style="yellow")
        return None

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the log so far as CSV."""
        names = report.columns(rows)
        with whole(self.path / "log.csv") as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)


def refuse_other(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on with a run under other settings, naming the first that differs."""
    for section in {**old, **new}:
        first, second = old.get(section), new.get(section)
        if first == second:
            continue
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            section = next(f"{section}.{key}" for key in {**first, **second} if first.get(key) != second.get(key))
            name = section.split(".", 1)[1]
            first, second = first.get(name), second.get(name)
        raise InputError(
            f"{path} holds a run with {section} = {first!r}, not {second!r}; choose another --out, or ask for the same"
        )
