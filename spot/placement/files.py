"""Placements on disk: the positions of many images in one safetensors file.

    positions     float32 (M, N, 2), or trajectories (M, steps + 1, N, 2): (y, x) as a fraction of the image;
                  with 3 columns for scales other than 1, or 7 with regions
    keys          uint8: the M keys in UTF-8, separated by zero bytes; a key is a path below the data's root
    values.NAME   (M, ...): further numbers per image, such as losses

The header contains "spot-placements", JSON with "version" and "metadata" (model, model_hash, prior, seed, objective,
settings), and the checksum of `spot.store`. `Placements` is such a file in memory. `PlacementWriter` writes it in
shards, so that an interrupted run resumes.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot.errors import InputError, check_kind, unknown
from spot.hashes import hash_json
from spot.store import decode_names, encode_names, read_tensors, refuse_difference, sweep, write_tensors
from spot.tokens.positions import COLUMNS

FORMAT, VERSION = "spot-placements", 1
PREFIX = "values."


@dataclass(frozen=True)
class Placements:
    """Positions of many images."""

    keys: Sequence[str]  # M image keys, all different
    trajectory: Tensor  # float32 (M, steps + 1, N, 2, 3 or 7); positions alone have one step
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON: model, settings, …
    values: Mapping[str, Tensor] = field(default_factory=dict)  # (M, ...) each

    def __post_init__(self) -> None:
        check_kind("placements", self.trajectory, Tensor)
        check_kind("keys", self.keys, list, tuple, advice="a name for each image")
        if self.trajectory.is_complex() or not all(isinstance(key, str) for key in self.keys):
            raise InputError("placements are real numbers, and keys are names of images, text")
        trajectory = self.trajectory[:, None] if self.trajectory.ndim == 3 else self.trajectory
        if trajectory.ndim != 4 or trajectory.shape[-1] not in COLUMNS or 0 in trajectory.shape[1:]:
            raise InputError(
                f"placements have shape (M, N, 2) or (M, steps + 1, N, 2), or 3 numbers for windows with a scale "
                f"and 7 with a region, "
                f"got {tuple(self.trajectory.shape)}"
            )
        object.__setattr__(self, "trajectory", trajectory.detach().to("cpu", torch.float32))
        for name, column in {"trajectory": trajectory, **self.values}.items():
            if len(column) != len(self.keys):
                raise InputError(f"{name} is for {len(column)} images, but there are {len(self.keys)} keys")
        if len(self._row) != len(self.keys):
            raise InputError("keys must differ from each other, but some image has two placements")
        if any("\0" in key or not key for key in self.keys):
            raise InputError("keys must not be empty, and free of zero bytes, which separate them in a file")
        if not self.trajectory.isfinite().all():
            raise InputError("placements must be finite, but some are NaN or infinite")
        if not (self.trajectory[..., 2:3] > 0).all():
            raise InputError("the third number of a placement is a window's scale and must be above 0")

    @cached_property
    def _row(self) -> dict[str, int]:
        return {key: row for row, key in enumerate(self.keys)}

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        steps, tokens, numbers = self.trajectory.shape[1:]
        sized = " with scales" if numbers == 3 else ""
        return f"Placements({len(self)} images, {tokens} tokens{sized}, {steps - 1} steps)"

    def __contains__(self, key: object) -> bool:
        return key in self._row

    @property
    def positions(self) -> Tensor:
        """The final positions (M, N, 2)."""
        return self.trajectory[:, -1]

    @property
    def tokens(self) -> int:
        """N, the number of tokens per image."""
        return self.trajectory.shape[2]

    def rows(self, keys: Iterable[str]) -> Tensor:
        """The row of each key."""
        keys = list(keys)
        for key in keys:
            if key not in self._row:
                raise unknown("placement for image", key, self.keys[:10_000])
        return torch.tensor([self._row[key] for key in keys], dtype=torch.int64)

    def positions_for(self, keys: Iterable[str], step: int = -1) -> Tensor:
        """Positions (B, N, 2) for keys, in their order, at a step of the search (default: the last)."""
        return self.trajectory[self.rows(keys), step]

    @classmethod
    def merge(cls, parts: Iterable["Placements"]) -> "Placements":
        """Concatenate placements that were made with the same settings."""
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
        """Write the file atomically."""
        single = self.trajectory.shape[1] == 1
        name, places = ("positions", self.positions) if single else ("trajectories", self.trajectory)
        tensors = {name: places, "keys": encode_names(self.keys)}
        tensors |= {PREFIX + name: column for name, column in self.values.items()}
        write_tensors(path, tensors, FORMAT, {"version": VERSION, "metadata": dict(self.metadata)})

    @classmethod
    def load(cls, path: str | Path) -> "Placements":
        """Read a file. Damaged files and other formats are refused."""
        tensors, about = read_tensors(path, FORMAT, "a placements file written by spot search")
        if about.get("version") != VERSION:
            raise InputError(f"{path} has version {about.get('version')}, this program reads version {VERSION}")
        try:
            keys = decode_names(tensors.pop("keys"))
            places = tensors.pop("positions" if "positions" in tensors else "trajectories")
            values = {name.removeprefix(PREFIX): column for name, column in tensors.items()}
            return cls(keys, places, dict(about["metadata"]), values)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged: its content makes no sense ({error})") from error


def shard_folder(path: str | Path) -> Path:
    """The folder of the shards of a placements file that is being written."""
    return Path(path).with_name(f"{Path(path).name}.shards")


def written_files(path: str | Path) -> list[Path]:
    """The placements file, if it exists, and its shards."""
    whole = [Path(path)] if Path(path).exists() else []
    return whole + sorted(shard_folder(path).glob("[!.]*.safetensors"))


class PlacementWriter:
    """Writes placements as shards next to `path`, and merges them into `path` at the end.

    Existing files with the same metadata are kept; others are refused. Several processes may write shards of different
    images; one process calls `finish`.
    """

    def __init__(self, path: str | Path, metadata: Mapping[str, Any]) -> None:
        self.path = Path(path)
        if self.path.suffix != ".safetensors":
            raise InputError(f"placements are written to a .safetensors file, got {self.path}")
        self.shards, self.metadata = shard_folder(path), dict(metadata)
        sweep(self.shards)
        self.done = {key for part in self._written() for key in part.keys}

    def _written(self) -> Iterator[Placements]:
        for file in written_files(self.path):
            part = Placements.load(file)
            refuse_difference(str(self.path), part.metadata, self.metadata, "write to another file or delete it")
            yield part

    def append(self, placements: Placements) -> None:
        """Write one shard."""
        placements.save(self.shards / f"{hash_json(list(placements.keys))}.safetensors")
        self.done.update(placements.keys)

    def finish(self, order: Iterable[str]) -> Placements:
        """Merge all shards into the file, with keys in this order first, and remove the shards."""
        if self.path.exists() and not self.shards.exists():
            return Placements.load(self.path)
        parts: list[Placements] = []
        seen: set[str] = set()
        for part in self._written():  # if finish() is killed, images are in the file and in shards
            fresh = [key for key in part.keys if key not in seen]
            seen.update(fresh)
            parts += [part.select(fresh)] if fresh else []
        if not parts:
            raise InputError(f"there is nothing to write to {self.path}: no image could be read")
        merged = Placements.merge(parts)
        listed = [key for key in order if key in seen]
        merged = merged.select(listed + sorted(seen.difference(listed)))
        merged.save(self.path)
        shutil.rmtree(self.shards, ignore_errors=True)
        return merged
