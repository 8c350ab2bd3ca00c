"""Measurements on disk, found by what determines them.

An entry is a safetensors file of tensors, named by a hash of what determines it (`about`: kind of
measurement, weights, images, placement, settings). It is written whole or not at all, so a study that
was killed finds what it had finished. An entry of another version of this program, or a damaged one,
is named and made again.
"""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spot import report
from spot.errors import InputError
from spot.placement.files import Placements
from spot.store import whole

KEY, FORMAT = "spot-measurement", 1


class Cache:
    """A folder of measurements."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, about: Mapping[str, Any]) -> Path:
        """Where the measurement is kept that this determines; a person can tell files apart too."""
        text = json.dumps(about, sort_keys=True)
        words = [
            str(about[name]) for name in ("backbone", "placement", "tokens", "seed") if about.get(name) is not None
        ]
        words = [re.sub(r"[^A-Za-z0-9_.-]+", "-", word) for word in words]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self.folder / str(about["kind"]) / f"{'-'.join([*words, digest])}.safetensors"

    def get(self, about: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The measurement, if there is one that this version made."""
        path = self.path(about)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get(KEY, "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, ValueError):
            say(f"{path} is damaged, so it is measured again")
            return None
        made = (header.get("format"), header.get("spot"))
        if made != (FORMAT, spot_version()):
            say(f"{path} was made by another version ({made[1]}, format {made[0]}), so it is measured again")
            return None
        return tensors

    def put(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep a measurement."""
        header = {"format": FORMAT, "spot": spot_version(), "about": dict(about)}
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        path = self.path(about)
        with disk(path), whole(path) as temporary:
            save_file(ready, temporary, metadata={KEY: json.dumps(header)})


@contextmanager
def disk(path: str | Path) -> Iterator[None]:
    """A disk that is full, or cannot be written to, is one sentence; what was finished before stays."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot write {path}: {reason}; what was finished stays, and the same command goes on"
        ) from error


def encoded(keys: list[str]) -> Tensor:
    """Image keys as a tensor of bytes."""
    return torch.frombuffer(bytearray("\0".join(keys).encode()), dtype=torch.uint8)


def decoded(keys: Tensor) -> list[str]:
    return bytes(keys.numpy()).decode().split("\0")


def digest(*tensors: Tensor) -> str:
    """Sixteen hexadecimal digits that change with any value."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def say(sentence: str) -> None:
    """Something a person should know, on stderr."""
    report.errors.print(f"spot: {sentence}", soft_wrap=True, markup=False, highlight=False)


def spot_version() -> str:
    from spot import __version__

    return __version__


def discard_stale(path: Path) -> None:
    """Remove a search of another version, or a damaged one, and say so."""
    shards = path.with_name(f"{path.name}.shards")
    for file in [path] * path.exists() + sorted(shards.glob("[!.]*.safetensors")):
        try:
            made = Placements.load(file).metadata.get("spot")
            trouble = "" if made == spot_version() else f"was made by another version ({made})"
        except InputError:
            trouble = "is damaged"
        if trouble:
            say(f"{file} {trouble}, so it is searched again")
            file.unlink()
    if shards.is_dir() and not any(shards.iterdir()):
        shutil.rmtree(shards)
