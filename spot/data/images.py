"""Images from folders and timm data sets, as (image, label, key).

`data_for(model, path)` opens data as a model wants it for evaluation, `open_data` with any
transform. Both yield samples `(image (C, H, W), label, key)`. The key names an image wherever
results or placements are kept per image: its path relative to the data root, with forward
slashes, or its number in a timm data set. The label is the model's class index, or -1 where
the data has none.

Folders: one sub-folder per class, ImageNet as `val/<wnid>/` and `train/<wnid>/` or as unpacked
from Kaggle, or a flat folder without labels. `wds/FOLDER` has WebDataset shards (`shards.py`); names
such as `torch/cifar10` and `hfds/…` go to timm. What to do with a file that cannot be read is the
caller's choice.
"""

import csv
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torchvision.transforms import Normalize

from spot.data.classes import class_folders, class_indices
from spot.data.difficulty import difficulty_of
from spot.data.files import EXTENSIONS, image_files, is_image
from spot.data.picture import open_image, photo_transform
from spot.data.shards import Shards
from spot.errors import InputError, unknown

if TYPE_CHECKING:
    from spot.data.scenes import Scenes

Transform = Callable[[Image.Image], Tensor]
Sample = tuple[Tensor, int, str]
Unreadable = Literal["stop", "skip"]

TIMM = re.compile(r"(torch|hfds|hfids|wds|tfds)/.+")
SPLITS = {"val": ("val", "validation", "valid", "eval"), "train": ("train", "training"), "test": ("test",)}
KAGGLE = Path("ILSVRC/Data/CLS-LOC")
CANVAS = "needle:"  # before the name of data whose images stand in a canvas


class Unread(NamedTuple):
    """What stands in the place of an image that could not be read."""

    key: str
    reason: str


class Images(Dataset[Sample | None]):
    """Images by number; an unreadable one raises InputError or, with "skip", is None.

    source: anything with source[i] = (path, file or PIL image; label).
    skipped: keys of unreadable images met so far; complete when a `loader` has been read to its end.
    """

    def __init__(
        self,
        source: Any,
        keys: Sequence[str],
        classes: list[str],
        *,
        transform: Transform,
        unreadable: Unreadable = "stop",
    ) -> None:
        if unreadable not in ("stop", "skip"):
            raise unknown("way with unreadable images", unreadable, ("stop", "skip"))
        self.source, self.keys, self.classes = source, keys, classes
        self.order: Sequence[int] = range(len(keys))
        self.transform, self.unreadable = transform, unreadable
        self.skipped: list[str] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Sample | None:
        sample = self.read(index)
        if not isinstance(sample, Unread):
            return sample
        self.leave_out(sample)
        return None

    def __getitems__(self, indices: Sequence[int]) -> list[Sample | Unread]:
        """A batch as `Loader` collates it: an error raised in a worker process would come with its whole traceback."""
        return [self.read(index) for index in indices]

    def read(self, index: int) -> Sample | Unread:
        """The sample, or why there is none."""
        source, label = self.source[self.order[index]]
        try:
            image = self.seen(open_image(source), index)
        except InputError as error:
            return Unread(self.keys[index], str(error))
        return image, -1 if label is None else int(label), self.keys[index]

    def seen(self, image: Image.Image, index: int) -> Tensor:
        """What a model sees of the image of this number."""
        return self.transform(image)

    def thin(self, limit: int) -> None:
        """Keep at most `limit` images, evenly spread over the data and so over its classes."""
        if limit < len(self):
            self.keep([index * len(self) // limit for index in range(limit)])

    def balance(self, limit: int) -> None:
        """Keep as many images of each class, at most `limit` in all, evenly spread over each class's own."""
        classes: dict[Any, list[int]] = {}
        for index, number in enumerate(self.order):
            classes.setdefault(self.source[number][1], []).append(index)
        each = min(limit // len(classes), min(map(len, classes.values())))
        if each < 1:
            raise InputError(f"{limit} images cannot be of all {len(classes)} classes alike; give a larger limit")
        self.keep([own[place * len(own) // each] for own in classes.values() for place in range(each)])

    def without(self, keys: Collection[str]) -> None:
        """Take out the images of these keys, all of which must be there."""
        left = self._known(keys, "to leave out")
        self.keep([index for index, key in enumerate(self.keys) if key not in left])

    def only(self, keys: Collection[str]) -> None:
        """Keep only the images of these keys, all of which must be there."""
        kept = self._known(keys, "to keep")
        self.keep([index for index, key in enumerate(self.keys) if key in kept])

    def _known(self, keys: Collection[str], why: str) -> set[str]:
        if missing := set(keys).difference(self.keys):
            raise InputError(f"there is no image {min(missing)} {why}, nor {len(missing) - 1} others")
        return set(keys)

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these images."""
        self.order = [self.order[index] for index in indices]
        self.keys = [self.keys[index] for index in indices]

    def leave_out(self, unread: Unread) -> None:
        """Note an unreadable image, or stop at it."""
        if self.unreadable == "stop":
            raise InputError(
                f"{unread.reason} ({unread.key}); unreadable='skip' (--skip-unreadable) goes on without it"
            )
        if unread.key not in self.skipped:
            self.skipped.append(unread.key)


def data_for(model: Any, path_or_name: str | Path, *, limit: int | None = None, **options: Any) -> "Data":
    """Data as a model wants it for evaluation: its size, mean, std and class indices.

    path_or_name, limit, options (split, unreadable, root): as for `open_data`; "scenes" or "needle", the built-in
        data sets; or "needle:" before a folder or name, whose images each stand in a canvas (spot/data/canvas.py).
    """
    from spot.data.scenes import Scenes

    config = model.data_config
    difficulty = difficulty_of(path_or_name)
    if difficulty is not None:
        split = options.get("split", "val")
        split = "validation" if split == "val" else split
        return Scenes(split, limit, difficulty=difficulty, transform=Normalize(config["mean"], config["std"]))
    options |= {
        "transform": photo_transform(config, getattr(model, "fit", "crop")),
        "classes": class_folders(model),
        "limit": limit,
    }
    if not str(path_or_name).startswith(CANVAS):
        return open_data(path_or_name, **options)
    from spot.data.canvas import Canvas

    return Canvas(open_data(str(path_or_name).removeprefix(CANVAS), **options))


def open_data(
    path_or_name: str | Path,
    *,
    transform: Transform,
    split: str = "val",
    unreadable: Unreadable = "stop",
    classes: Sequence[str] | int | None = None,
    limit: int | None = None,
    root: str | Path | None = None,
) -> Images:
    """Open an image folder or a timm data set by name.

    split: "val", "train" or "test", where the data has more than one.
    classes: the model's class folders (`class_folders(model)`): labels are then the model's
        indices, also when only some of the classes are there. None: sorted folders, from 0.
    limit: at most so many images, evenly spread over the data and so over its classes.
    root: where a timm data set keeps its files.
    """
    if limit is not None and limit < 1:
        raise InputError(f"at least one image is needed, got a limit of {limit}")
    if TIMM.fullmatch(str(path_or_name)) and not Path(path_or_name).is_dir():
        data = timm_data(str(path_or_name), split, root, transform=transform, unreadable=unreadable)
        count = classes if isinstance(classes, int) else len(classes or data.classes)
        if data.classes and len(data.classes) != count:
            raise InputError(f"{path_or_name} has {len(data.classes)} classes, the model {count}")
        if classes is not None and isinstance(data.source, Shards):
            highest = max(entry.label for entry in data.source.entries)
            if highest >= count:
                raise InputError(f"{path_or_name} has class {highest}, the model's are 0 to {count - 1}")
    else:
        data = image_folder(Path(path_or_name), split, classes, transform=transform, unreadable=unreadable)
    if limit is not None:
        data.thin(limit)
    return data


def listed(file: Path) -> list[str]:
    """The keys that a file names, one a line, as paths below the data's root."""
    if not file.is_file():
        raise InputError(f"there is no file {file} that names images, one a line, as paths below the data's root")
    return [line for line in file.read_text(errors="surrogateescape").splitlines() if line]


def image_folder(root: Path, split: str, classes: Sequence[str] | int | None, **options: Any) -> Images:
    """The images of a folder and its sub-folders; keys are relative to the folder that was named."""
    if not root.is_dir():
        what = "a file" if root.exists() else "missing"
        raise InputError(f"a folder of images was expected, but {root} is {what}")
    top = split_folder(root, split)
    folders = subfolders(top)
    files = sorted(str(path) for path in top.iterdir() if path.is_file() and is_image(str(path)))
    if folders and files:
        raise InputError(f"{top} holds images beside folders, such as {Path(files[0]).name}; name one folder")
    if folders:
        indices = class_indices(folders, classes)
        samples = [(file, index) for name, index in sorted(indices.items()) for file in image_files(top / name)]
    else:
        answers = root / f"LOC_{split}_solution.csv"
        wnids = {}  # of Kaggle's flat folder of validation images
        if answers.is_file():
            with answers.open(newline="") as file:
                wnids = {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
        indices = class_indices(sorted(set(wnids.values())), classes) if wnids else {}
        samples = [(file, indices.get(wnids.get(Path(file).stem, ""), -1)) for file in files]
    if not samples:
        raise InputError(f"there is no image in {top}; images end in {', '.join(EXTENSIONS)}")
    keys = [Path(file).relative_to(root).as_posix() for file, _ in samples]
    known = list(indices) if classes is None or isinstance(classes, int) else list(classes)
    return Images(samples, keys, known, **options)


def subfolders(folder: Path) -> list[str]:
    """Names of the visible sub-folders, sorted as code points, as torchvision and timm sort them."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")


def split_folder(root: Path, split: str) -> Path:
    """The folder of a split: root/val and the like if root is divided so, otherwise root itself.

    A folder counts as a split only if it holds folders, so that a class may be called `train`.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if (root / KAGGLE / split).is_dir():
        return root / KAGGLE / split
    names = (name for group in SPLITS.values() for name in group)
    there = [name for name in names if (root / name).is_dir() and subfolders(root / name)]
    for name in SPLITS[split]:
        if name in there:
            return root / name
    if there:
        raise InputError(f"{root} holds {', '.join(there)}, but no {split}; name the split you want")
    return root


def timm_data(name: str, split: str, root: str | Path | None, **options: Any) -> Images:
    """A data set timm knows by name, see timm.data.create_dataset; or `wds/FOLDER`, whose shards are read here."""
    kind, _, rest = name.partition("/")
    if kind == "wds":
        shards = Shards(*shards_of(Path(rest if root is None else root), split), EXTENSIONS)
        return Images(shards, shards.keys, [], **options)
    from timm.data import create_dataset

    if kind in ("hfds", "hfids") and find_spec("datasets") is None:  # timm would print a line of its own
        raise InputError(f"{name} needs datasets; pip install 'spot-vit[data]'")
    if kind == "torch" and root is None:
        raise InputError(f"{name} needs a folder for its files; give the data root too")
    try:
        data = create_dataset(
            name,
            root=None if root is None else str(root),
            split={"val": "validation"}.get(split, split),
            download=name not in ("torch/folder", "torch/image_folder"),
        )
    except ImportError as error:
        raise InputError(f"{name} needs another package: {error}") from None
    except (AssertionError, RuntimeError, ValueError, KeyError, OSError) as error:
        raise InputError(f"timm could not open {name}: {' '.join(str(error).split())}") from None
    if isinstance(data, IterableDataset):
        raise InputError(f"{name} is a stream, whose images have no numbers; use a folder, hfds/ or shards on a disk")
    source: Any = getattr(data, "reader", data)  # the reader itself: timm's wrapper replaces unreadable images
    indices = getattr(source, "class_to_idx", None) or {}
    classes = [str(label) for label in sorted(indices, key=lambda label: indices[label])]
    return Images(source, [f"{index:08d}" for index in range(len(source))], classes, **options)


def shards_of(root: Path, split: str) -> tuple[list[Path], str]:
    """The shards of a split, and the field of a sample's .json that is its label, if it is not in a .cls.

    As timm's _info.json names them; without it the files whose names have the split's as a word, or all, if none has
    a split's.
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
            raise InputError(f"{about} names no shards of splits: {error}") from None
        raise InputError(f"{root} has the splits {', '.join(splits)}, and no {split}; name one of them")
    named = {path: set(re.split(r"[^a-z]+", path.name.lower())) for path in sorted(root.glob("*.tar"))}
    divided = any(each.intersection(names) for each in named.values() for names in SPLITS.values())
    chosen = [path for path, each in named.items() if not divided or each.intersection(words)]
    if not chosen:
        raise InputError(f"there is no shard of split {split} in {root}; shards end in .tar")
    return chosen, ""


Data = Union[Images, "Scenes"]
