"""WebDataset shards with random access: tar files that store the parts of a sample consecutively.

timm streams shards; with several processes a stream may repeat some images and omit others. Here the headers are read
once and each image is then read by one seek, so shards can be used wherever a folder can.
"""

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from spot.data.folders import SPLITS, is_image
from spot.errors import InputError

NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # WebDataset names: the sample's name, then the part's extension


class Entry(NamedTuple):
    """The location of an image's bytes, and its label or -1."""

    file: str
    start: int
    length: int
    label: int


class Shards:
    """shards[i] = (bytes of image i as a file, label). Keys are `shard/sample`, in the order of the files."""

    def __init__(self, files: Sequence[str | Path], label_field: str = "") -> None:
        """label_field: the label's field in a sample's .json; if empty, its .cls contains the label."""
        self.files = [str(file) for file in files]
        found: dict[str, Entry] = {}
        for file in self.files:
            for sample, entry in read_entries(file, label_field):
                key = f"{Path(file).name.removesuffix('.tar')}/{sample}"
                if key in found:
                    raise InputError(f"two images are called {key}; samples and shards need names of their own")
                found[key] = entry
        if not found:
            raise InputError(f"there is no image in the shards {', '.join(self.files[:3])}")
        self.keys, self.entries = list(found), list(found.values())

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        entry = self.entries[index]
        with open(entry.file, "rb") as file:  # reopened, because workers must not share a file offset
            file.seek(entry.start)
            return io.BytesIO(file.read(entry.length)), entry.label

    def state(self) -> list[list[int]]:
        """Size and modification time of each shard, to detect rewritten shards."""
        return [[state.st_size, state.st_mtime_ns] for state in map(os.stat, self.files)]


def read_entries(file: str, label_field: str) -> Iterator[tuple[str, Entry]]:
    """The samples of a shard that contain an image: their names and entries."""
    try:
        with tarfile.open(file, "r:") as tar:
            named = ((NAME.fullmatch(member.name), member) for member in tar if member.isfile())
            matched = ((match[1], match[2].lower(), member) for match, member in named if match)
            for sample, group in groupby(matched, key=lambda part: part[0]):
                parts = {extension: member for _, extension, member in group}
                image = next((part for part in parts.values() if is_image(part.name)), None)
                if image is not None:
                    label = read_label(tar, parts, label_field, f"{file}, {sample}")
                    yield sample, Entry(file, image.offset_data, image.size, label)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InputError(f"{file} is not a readable shard: {error}") from None


def read_label(tar: tarfile.TarFile, parts: dict[str, tarfile.TarInfo], label_field: str, sample: str) -> int:
    """The label of a sample, or -1 if it has none."""
    part = parts.get("json" if label_field else "cls")
    data = tar.extractfile(part) if part is not None else None
    if data is None:
        return -1
    text = data.read().decode(errors="replace")
    try:
        return int(json.loads(text)[label_field] if label_field else text)
    except (ValueError, KeyError, TypeError):
        what = f"a field {label_field} that is a class number" if label_field else "a class number in its .cls"
        raise InputError(f"{sample} must have {what}, got {text.strip()[:40]!r}") from None


def open_shards(root: Path, split: str) -> Shards:
    """Open the shards of a split.

    timm's _info.json lists the shards, and the .json field with the label. Without it, a file belongs to the split that
    occurs in its name. If no name contains a split, all files are used.
    """
    if not root.is_dir():
        raise InputError(f"wds/ needs a folder of shards on this disk, and {root} is none; download them first")
    info = next((root / file for file in ("_info.json", "info.json") if (root / file).is_file()), None)
    words = SPLITS.get(split, (split,))
    if info is not None:
        try:
            splits = {
                name: ([root / file for file in about["filenames"]], about.get("alt_label") or "")
                for name, about in json.loads(info.read_text()).get("splits", {}).items()
            }
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise InputError(f"{info} does not list the shards of each split: {error}") from None
        for name in words:
            if name in splits:
                return Shards(*splits[name])
        raise InputError(f"{root} has the splits {', '.join(splits)}, and no {split}; name one of them")
    named = {path: set(re.split(r"[^a-z]+", path.name.lower())) for path in sorted(root.glob("*.tar"))}
    divided = any(found.intersection(names) for found in named.values() for names in SPLITS.values())
    files = [path for path, found in named.items() if not divided or found.intersection(words)]
    if not files:
        raise InputError(f"there is no shard of split {split} in {root}; shards end in .tar")
    return Shards(files)
