"""Measurements on disk: one file per entry, named by a hash of everything that determines it.

The hash (of `about`) covers the weights, the positions on one fixed image (and thus every constant of a prior), the
budget, the seed, the image files and the saliency maps. A change of any of these gives another file. Entries are
written atomically, so a study that was killed finds its finished measurements. An entry of another version of this
program, or a damaged one, is reported and measured again.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import spot
from spot import report
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, model_of
from spot.hashes import hash_json, hash_tensors
from spot.placement.files import Placements, written_files
from spot.store import encode_names, read_tensors, refuse_difference, write_tensors

KEY, FORMAT = "spot-measurement", 3


class Cache:
    """A folder of measurements."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, about: Mapping[str, Any]) -> Path:
        """The file for the measurement with this description: a readable name and a hash of `about`."""
        words = [str(about[name]) for name in ("name", "placement", "tokens", "seed") if about.get(name) is not None]
        words = [re.sub(r"[^A-Za-z0-9_.-]+", "-", word) for word in words]
        return self.folder / str(about["kind"]) / f"{'-'.join([*words, hash_json(about)[:12]])}.safetensors"

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
        if made != (FORMAT, spot.__version__):
            report.warn(f"{path} was made by another version ({made[1]}, format {made[0]}), so it is measured again")
            return None
        return tensors

    def search_path(self, about: Mapping[str, Any]) -> Path:
        """The placements file of a search. Damaged files and those of another version are removed, to be made again."""
        path = self.path(about)
        for file in written_files(path):
            try:
                version = Placements.load(file).metadata.get("spot")
                refuse_difference(str(file), {"spot": version}, {"spot": spot.__version__})
            except InputError as error:
                report.warn(f"{error}; it is made again")
                file.unlink(missing_ok=True)
        return path

    def put(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Store a measurement."""
        header = {"format": FORMAT, "spot": spot.__version__, "about": dict(about)}
        write_tensors(self.path(about), tensors, KEY, header)


@torch.no_grad()
def hash_places(setting: Setting) -> str:
    """Hash a setting's positions: the given ones, or those on one fixed image with a fixed saliency map."""
    if isinstance(setting.placement, Placements):
        given = setting.placement
        return hash_tensors({"positions": given.positions, "keys": encode_names(given.keys)})
    height, width = model_of(setting).spot_vit.img_size
    ramp = torch.linspace(0.1, 1, height)[:, None] * torch.linspace(1, 0.1, width)
    image = ramp.expand(1, 3, height, width).to(next(model_of(setting).parameters()).device)
    return hash_tensors({"positions": setting.place(image, ["probe"], ramp[None])})
