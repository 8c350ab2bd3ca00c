"""Placements on disk: where each image's tokens go, and what made them so.

One safetensors file holds the positions of many images, keyed by image. Any program can read it:

    positions     float32 (M, N, 2), or trajectories (M, steps + 1, N, 2): (y, x) as a fraction of the image
    keys          uint8: the M keys in UTF-8, separated by zero bytes; a key is a path below the data's root
    values.NAME   (M, ...): further numbers per image, such as losses

and in the header, under "spot-placements", JSON with "version", "metadata" (what made them: model,
model_hash, prior, seed, objective, settings) and "sha256" (of the tensors, in the order of their names).

`Placements` is such a file in memory. `PlacementWriter` writes one in shards, each whole or not at
all, so that a run that was killed goes on where it stopped.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from spot.errors import InputError
from spot.store import whole

FORMAT, VERSION = "spot-placements", 1
PREFIX = "values."


@dataclass(frozen=True)
class Placements:
    """Positions of many images. Not to be changed: `merge` makes a larger one."""

    keys: Sequence[str]  # M image keys, all different
    trajectory: Tensor  # float32 (M, steps + 1, N, 2); positions alone are one step
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON: what made them
    values: Mapping[str, Tensor] = field(default_factory=dict)  # (M, ...) each

    def __post_init__(self) -> None:
        trajectory = self.trajectory[:, None] if self.trajectory.ndim == 3 else self.trajectory
        if trajectory.ndim != 4 or trajectory.shape[-1] != 2:
            raise InputError(
                f"placements have shape (M, N, 2) or (M, steps + 1, N, 2), got {tuple(self.trajectory.shape)}"
            )
        object.__setattr__(self, "trajectory", trajectory.detach().to("cpu", torch.float32))
        for name, column in {"trajectory": trajectory, **self.values}.items():
            if len(column) != len(self.keys):
                raise InputError(f"{name} is for {len(column)} images, but there are {len(self.keys)} keys")
        if len(self._row) != len(self.keys):
            raise InputError("keys must differ from each other, but some image has two placements")
        if not self.trajectory.isfinite().all():
            raise InputError("placements must be finite, but some are NaN or infinite")

    @cached_property
    def _row(self) -> dict[str, int]:
        return {key: row for row, key in enumerate(self.keys)}

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._row

    @property
    def positions(self) -> Tensor:
        """The final positions (M, N, 2)."""
        return self.trajectory[:, -1]

    @property
    def tokens(self) -> int:
        """N, how many tokens each image has."""
        return self.trajectory.shape[2]

    def rows(self, keys: Iterable[str]) -> Tensor:
        """The row of each key."""
        return torch.tensor([self._find(key) for key in keys], dtype=torch.int64)

    def positions_for(self, keys: Iterable[str], step: int = -1) -> Tensor:
        """Positions (B, N, 2) of these images, in their order, at a step of the search (the last)."""
        return self.trajectory[self.rows(keys), step]

    def _find(self, key: str) -> int:
        if key in self._row:
            return self._row[key]
        near = get_close_matches(key, self.keys, n=1) if len(self.keys) < 10_000 else []
        advice = f"; the nearest is {near[0]!r}" if near else ""
        raise InputError(f"there is no placement for image {key!r} among {len(self.keys)}{advice}")

    @classmethod
    def merge(cls, parts: Iterable["Placements"]) -> "Placements":
        """All images of placements that were made in the same way."""
        parts = list(parts)
        if not parts:
            raise InputError("there is nothing to merge; give at least one file of placements")
        first = parts[0]
        for part in parts[1:]:
            refuse_difference("the placements", first.metadata, part.metadata)
            if part.trajectory.shape[1:] != first.trajectory.shape[1:] or set(part.values) != set(first.values):
                raise InputError(
                    f"placements of shape {tuple(first.trajectory.shape[1:])} and "
                    f"{tuple(part.trajectory.shape[1:])} do not go into one file"
                )
        return cls(
            keys=[key for part in parts for key in part.keys],
            trajectory=torch.cat([part.trajectory for part in parts]),
            metadata=first.metadata,
            values={name: torch.cat([part.values[name] for part in parts]) for name in first.values},
        )

    def select(self, keys: Iterable[str]) -> "Placements":
        """The placements of some images, in the order of `keys`."""
        keys = list(keys)
        rows = self.rows(keys)
        values = {name: column[rows] for name, column in self.values.items()}
        return Placements(keys, self.trajectory[rows], self.metadata, values)

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        single = self.trajectory.shape[1] == 1
        name, places = ("positions", self.positions) if single else ("trajectories", self.trajectory)
        tensors = {name: places, "keys": _encoded(self.keys)}
        tensors |= {PREFIX + name: column for name, column in self.values.items()}
        tensors = {name: column.detach().cpu().contiguous() for name, column in tensors.items()}
        about = {"version": VERSION, "metadata": dict(self.metadata), "sha256": _digest(tensors)}
        with whole(path) as temporary:
            # One entry: safetensors writes several in random order, and equal placements are equal files.
            save_file(tensors, temporary, metadata={FORMAT: json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> "Placements":
        """Read a file; a damaged or foreign one is refused."""
        path = Path(path)
        if not path.is_file():
            raise InputError(
                f"a placements file was expected, but {path} is {'a folder' if path.exists() else 'missing'}"
            )
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, ValueError) as error:
            raise InputError(f"{path} is not a placements file, or is damaged: {error}") from None
        if FORMAT not in header:
            raise InputError(f"{path} is a safetensors file without placements; spot search writes such files")
        checksum = _digest(tensors)
        try:
            about = json.loads(header[FORMAT])
            version, written, metadata = about["version"], about["sha256"], about["metadata"]
            keys = _decoded(tensors.pop("keys"))
            places = tensors.pop("positions" if "positions" in tensors else "trajectories")
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} is damaged: its header makes no sense") from None
        if version != VERSION:
            raise InputError(f"{path} has version {version}, this program reads version {VERSION}")
        if written != checksum:
            raise InputError(f"{path} is damaged: its content is not what its checksum was made of")
        values = {name.removeprefix(PREFIX): column for name, column in tensors.items()}
        return cls(keys, places, metadata, values)


class PlacementWriter:
    """Placements written in shards beside `path`, and into `path` when all are there.

    What was written before with the same metadata counts as done; with other metadata it is refused.
    Several processes may write shards of different names at a time; one of them calls `finish`.
    """

    def __init__(self, path: str | Path, metadata: Mapping[str, Any]) -> None:
        self.path = Path(path)
        if self.path.suffix != ".safetensors":
            raise InputError(f"placements are written to a .safetensors file, got {self.path}")
        self.shards = self.path.with_name(f"{self.path.name}.shards")
        self.metadata = dict(metadata)
        self.done = {key for part in self._written() for key in part.keys}

    def _written(self) -> Iterable[Placements]:
        files = [self.path] if self.path.exists() else []
        for file in files + sorted(self.shards.glob("[!.]*.safetensors")):
            part = Placements.load(file)
            refuse_difference(str(self.path), part.metadata, self.metadata, "write to another file or delete it")
            yield part

    def append(self, name: str, placements: Placements) -> None:
        """Write one shard. `name` orders shards and must not have been used for other images."""
        refuse_difference(str(self.path), self.metadata, placements.metadata)
        placements.save(self.shards / f"{name}.safetensors")
        self.done.update(placements.keys)

    def finish(self, order: Iterable[str]) -> Placements:
        """Merge all shards into the file, with keys in this order first, and remove the shards."""
        if self.path.exists() and not self.shards.exists():
            return Placements.load(self.path)
        parts: list[Placements] = []
        seen: set[str] = set()
        for part in self._written():  # a kill during finish() leaves images in the file and in shards
            fresh = [key for key in part.keys if key not in seen]
            seen.update(fresh)
            parts += [part.select(fresh)] if fresh else []
        if not parts:
            raise InputError(f"there is nothing to write to {self.path}: no image was searched")
        merged = Placements.merge(parts)
        listed = [key for key in order if key in seen]
        merged = merged.select(listed + sorted(seen.difference(listed)))
        merged.save(self.path)
        shutil.rmtree(self.shards, ignore_errors=True)
        return merged


def refuse_difference(what: str, there: Mapping[str, Any], here: Mapping[str, Any], advice: str = "") -> None:
    """Refuse to mix placements that were made differently, naming the first difference."""
    there, here = _flat(there), _flat(here)
    for name in [*there, *(name for name in here if name not in there)]:
        if there.get(name) != here.get(name):
            found = f"{what} was made with {name}={there.get(name)!r}, now {name}={here.get(name)!r}"
            raise InputError(f"{found}; {advice}" if advice else found)


def fingerprint(model: nn.Module) -> str:
    """Sixteen hexadecimal digits that change with any weight or buffer of the model."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def _flat(metadata: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in metadata.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _encoded(keys: Iterable[str]) -> Tensor:
    return torch.frombuffer(bytearray("\0".join(keys).encode()), dtype=torch.uint8)


def _decoded(keys: Tensor) -> list[str]:
    return bytes(keys.numpy()).decode().split("\0")


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()
