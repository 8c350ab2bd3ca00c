"""WebDataset shards with random access: tar files that store the parts of a sample consecutively.

timm streams shards; with several processes a stream may repeat some images and omit others. Here the headers are read
once and each image is then read by one seek, so shards can be used wherever a folder can.
"""

import io
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from spot.data.files import SPLITS, is_image
from spot.errors import InputError

NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # WebDataset names: the sample's key, then the part's extension


class Entry(NamedTuple):
    """The location of an image's bytes, and its label or -1."""

    file: int
    start: int
    length: int
    label: int


class Shards:
    """shards[i] = (bytes of image i as a file, label). Keys are `shard/sample`, in the order of the files."""

    def __init__(self, files: Sequence[str | Path], target: str) -> None:
        """target: the label's field in a sample's .json; if empty, its .cls contains the label."""
        self.files = [str(file) for file in files]
        self.target = target
        self.keys: list[str] = []
        self.entries: list[Entry] = []
        for number, file in enumerate(self.files):
            for key, entry in self._samples(number, file):
                self.keys.append(f"{Path(file).name.removesuffix('.tar')}/{key}")
                self.entries.append(entry)
        if not self.keys:
            raise InputError(f"there is no image in the shards {', '.join(self.files[:3])}")
        if len(set(self.keys)) < len(self.keys):
            twice = Counter(self.keys).most_common(1)[0][0]
            raise InputError(f"two images are called {twice}; samples and shards need names of their own")

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        entry = self.entries[index]
        with open(self.files[entry.file], "rb") as file:  # reopened, because workers must not share a file offset
            file.seek(entry.start)
            return io.BytesIO(file.read(entry.length)), entry.label

    def state(self) -> list[list[int]]:
        """Size and modification time of each shard, to detect rewritten shards."""
        return [[state.st_size, state.st_mtime_ns] for state in map(os.stat, self.files)]

    def _samples(self, number: int, file: str) -> Iterator[tuple[str, Entry]]:
        try:
            with tarfile.open(file, "r:") as tar:
                parts = ((NAME.fullmatch(member.name), member) for member in tar if member.isfile())
                named = ((match[1], match[2].lower(), member) for match, member in parts if match)
                for key, members in groupby(named, key=lambda part: part[0]):
                    sample = {extension: member for _, extension, member in members}
                    image = next((sample[each] for each in sample if is_image(f"{key}.{each}")), None)
                    if image is not None:
                        label = self._label(tar, sample, f"{file}, {key}")
                        yield key, Entry(number, image.offset_data, image.size, label)
        except (tarfile.TarError, OSError, EOFError) as error:
            hint = "; unpack it to .tar" if file.endswith((".gz", ".tgz", ".zst", ".bz2", ".xz")) else ""
            raise InputError(f"{file} is not a readable shard: {error}{hint}") from None

    def _label(self, tar: tarfile.TarFile, sample: dict[str, tarfile.TarInfo], name: str) -> int:
        part = sample.get("json" if self.target else "cls")
        data = tar.extractfile(part) if part is not None else None
        if data is None:
            return -1
        text = data.read().decode(errors="replace")
        try:
            return int(json.loads(text)[self.target] if self.target else text)
        except (ValueError, KeyError, TypeError):
            what = f"a field {self.target} that is a class number" if self.target else "a class number in its .cls"
            raise InputError(f"{name} must have {what}, got {text.strip()[:40]!r}") from None


def shards_of(root: Path, split: str) -> tuple[list[Path], str]:
    """The shards of a split, and the .json field that contains the label; empty if the label is in a .cls.

    timm's _info.json lists the shards. Without it, a file belongs to the split that occurs in its name. If no name
    contains a split, all files are used.
    """
    if not root.is_dir():
        raise InputError(f"wds/ needs a folder of shards on this disk, and {root} is none; download them first")
    about = next((root / file for file in ("_info.json", "info.json") if (root / file).is_file()), None)
    words = SPLITS.get(split, (split,))
    if about is not None:
        try:
            splits = json.loads(about.read_text()).get("splits", {})
            found = next((splits[name] for name in words if name in splits), None)
            if found is not None:
                return [root / file for file in found["filenames"]], found.get("alt_label") or ""
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise InputError(f"{about} does not list the shards of each split: {error}") from None
        raise InputError(f"{root} has the splits {', '.join(splits)}, and no {split}; name one of them")
    named = {path: set(re.split(r"[^a-z]+", path.name.lower())) for path in sorted(root.glob("*.tar"))}
    divided = any(each.intersection(names) for each in named.values() for names in SPLITS.values())
    chosen = [path for path, each in named.items() if not divided or each.intersection(words)]
    if not chosen:
        raise InputError(f"there is no shard of split {split} in {root}; shards end in .tar")
    return chosen, ""
