"""Measurements on disk, keyed by everything that determines them (spot/evaluation/cache.py).

Entries are written atomically, so a study that was killed finds its finished measurements. An entry of another
version of this program, or a damaged one, is reported and measured again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from spot import report
from spot.errors import InputError
from spot.evaluation.cache import entry_path, spot_version
from spot.store import read_tensors, write_tensors

KEY, FORMAT = "spot-measurement", 3


class Cache:
    """A folder of measurements."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, about: Mapping[str, Any]) -> Path:
        """The file for the measurement with this description."""
        return entry_path(self.folder, about)

    def get(self, about: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The measurement, if this version of the program has stored it."""
        path = self.path(about)
        if not path.is_file():
            return None
        try:
            tensors, header = read_tensors(path, KEY, "a measurement")
        except InputError as error:
            report.warn(f"{error}; it is measured again")
            return None
        made = (header.get("format"), header.get("spot"))
        if made != (FORMAT, spot_version()):
            report.warn(f"{path} was made by another version ({made[1]}, format {made[0]}), so it is measured again")
            return None
        return tensors

    def put(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Store a measurement."""
        header = {"format": FORMAT, "spot": spot_version(), "about": dict(about)}
        write_tensors(self.path(about), tensors, KEY, header)
