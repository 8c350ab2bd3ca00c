"""Measured things on disk, found by what determines them.

An entry is a file named by a hash of what determines it (`about`). It is written whole or not at all, so
a study that was killed finds what it had finished. An entry of another version of this program, or a
damaged one, is named and made again.

What determines the outcome of a candidate is put together here, and only here (`determinants`): the
content of its weights, where it puts the tokens of one fixed image (and so every constant of its prior),
its budget and seed, the image files, and the files of the saliency maps it reads.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot import report
from spot.data.canvas import Canvas
from spot.data.images import Data, Stream
from spot.data.scenes import Scenes
from spot.data.shards import Shards
from spot.errors import InputError
from spot.evaluation.accuracy import Candidate
from spot.hashes import hash_file, hash_json, hash_listing, hash_tensors
from spot.placement.files import Placements
from spot.placement.priors import resolve_prior
from spot.store import encode_names, read_tensors, write_tensors

KEY, FORMAT = "spot-measurement", 3


class Cache:
    """A folder of measurements."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, about: Mapping[str, Any]) -> Path:
        """Where the measurement is kept that this determines; a person can tell files apart too."""
        words = [str(about[name]) for name in ("name", "placement", "tokens", "seed") if about.get(name) is not None]
        words = [re.sub(r"[^A-Za-z0-9_.-]+", "-", word) for word in words]
        return self.folder / str(about["kind"]) / f"{'-'.join([*words, hash_json(about)[:12]])}.safetensors"

    def get(self, about: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The measurement, if there is one that this version made."""
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
        """Keep a measurement."""
        header = {"format": FORMAT, "spot": spot_version(), "about": dict(about)}
        write_tensors(self.path(about), tensors, KEY, header)


def determinants(candidate: Candidate, weights: str, images: str, maps: str = "") -> dict[str, Any]:
    """What determines the outcome of a candidate, as JSON.

    Args:
        weights: `hash_model` of the SpotViT whose weights it uses.
        images: `hash_images` of the images, and how they are prepared.
        maps: `hash_maps` of the saliency maps; left out where none are read.
    """
    return {
        "model": type(candidate.model).__name__,
        "weights": weights,
        "placement": candidate.label,
        "tokens": candidate.budget,
        "seed": candidate.seed,
        "places": hash_places(candidate),
        "images": images,
        "maps": maps if needs_map(candidate) else "",
    }


def needs_map(candidate: Candidate) -> bool:
    """Whether a candidate's prior reads saliency maps."""
    placement = candidate.placement
    return placement is not None and not isinstance(placement, Placements) and resolve_prior(placement).needs_map


@torch.no_grad()
def hash_places(candidate: Candidate) -> str:
    """Where a candidate puts tokens: given positions, or those on one fixed image with a fixed saliency map."""
    if isinstance(candidate.placement, Placements):
        given = candidate.placement
        return hash_tensors({"positions": given.positions, "keys": encode_names(given.keys)})
    height, width = candidate.model.spot_vit.img_size
    ramp = torch.linspace(0.1, 1, height)[:, None] * torch.linspace(1, 0.1, width)
    image = ramp.expand(1, 3, height, width).to(next(candidate.model.parameters()).device)
    return hash_tensors({"positions": candidate.place(image, ["probe"], lambda *_: ramp[None])})


def hash_images(data: Data) -> str:
    """Sixteen hexadecimal digits that change when an image is added, removed, renamed or rewritten."""
    if isinstance(data, Scenes):
        return hash_json(["scenes", data.split, data.seed, data.length, str(data.difficulty)])
    if isinstance(data, Stream):
        raise InputError("a stream's images have no names to compare results by; use a folder, or shards on a disk")
    about: list[Any] = ["canvas"] if isinstance(data, Canvas) else []
    about += data.source.state() if isinstance(data.source, Shards) else []
    for key, index in zip(data.keys, data.order, strict=True):
        about.append(key)
        if isinstance(data.source, list):  # files; a timm data set has its samples' numbers only
            path, label = data.source[index]
            state = Path(path).stat()
            about += [label, state.st_size, state.st_mtime_ns]
    return hash_json(about)


def hash_maps(source: str) -> str:
    """The name of a source of saliency maps and, for files, a hash of what they are."""
    path, content = Path(source), source
    if path.is_file():
        content = hash_file(path)
    elif path.is_dir():
        content = hash_listing(path, "*.png")
    return f"{path.name} {hash_json(content)[:12]}"


def spot_version() -> str:
    from spot import __version__

    return __version__
