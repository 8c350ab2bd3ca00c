"""The folder of a training run.

    run.json                the recipe and all other settings that determine the outcome
    log.csv, log.png        one row per epoch, and the paper's retrofit plot
    checkpoints/STEP.pt     the last two checkpoints, written atomically
    model/                  the trained model, for spot.load

`spot learn` keeps its intermediate results in such a folder. The same command with the same folder resumes an
interrupted run. A folder with other content is refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spot import report
from spot.errors import InputError
from spot.processes import this_process
from spot.store import (
    as_json,
    is_leftover,
    locked,
    read_json,
    read_state,
    refuse_difference,
    sweep,
    write_json,
    write_state,
)

KEPT = 2


class RunFolder:
    """The folder of a new run, or of an earlier run with the same settings."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(folder)
        self.settings = as_json(settings)
        self.check()

    def check(self) -> None:
        """Refuse a folder that holds a run with other settings, or something else."""
        file = self.path / "run.json"
        if file.is_file():
            run = read_json(file, "the settings of a training run")
            there = run.get("settings") if isinstance(run, dict) else None
            if not isinstance(there, dict):
                raise InputError(f"{file} is damaged: it has no settings; choose another --out")
            refuse_difference(
                f"the run in {self.path}", there, self.settings, "choose another --out, or the same settings"
            )
        elif self.path.exists() and (not self.path.is_dir() or not all(map(is_leftover, self.path.iterdir()))):
            raise InputError(f"{self.path} holds something that is not a training run; choose another --out")

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context manager that locks the folder and writes the settings; the main process does so for all others."""
        if not this_process().is_main_process:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path, f"the run in {self.path}"):
            self.check()  # again: another run may have begun since
            sweep(self.path)
            sweep(self.path / "checkpoints")
            if not (self.path / "run.json").is_file():
                write_json(self.path / "run.json", {"settings": self.settings, "versions": report.versions()})
            yield

    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, newest first."""
        return sorted((self.path / "checkpoints").glob("[0-9]*.pt"), reverse=True)

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Write a checkpoint and remove old ones."""
        write_state(self.path / "checkpoints" / f"{step:08d}.pt", dict(state))
        for old in self.checkpoints()[KEPT:]:
            old.unlink(missing_ok=True)

    def load(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, or None."""
        for file in self.checkpoints():
            try:
                return read_state(file)
            except InputError as error:
                report.warn(f"{error}; resuming from the one before")
        return None
