"""Images from folders and timm data sets, as (image, label, key).

`data_for(model, path)` opens data with a model's evaluation transform, `open_data` with any
transform. Both yield samples `(image (C, H, W), label, key)`. The key identifies an image in
results and placements: its path relative to the data root, with forward slashes, or its number in
a timm data set. The label is the model's class index, or -1 for data without labels.

Folders have one sub-folder per class, ImageNet's layout `val/<wnid>/` and `train/<wnid>/` or that
of Kaggle, or images without labels. `wds/FOLDER` contains WebDataset shards (`shards.py`). timm opens
names such as `torch/cifar10` and `hfds/…`. With `unreadable` the caller chooses whether to stop at an
unreadable file or skip it.
"""

import csv
import os
import re
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import Normalize

from spot.data.classes import class_folders, class_indices
from spot.data.difficulty import difficulty_of
from spot.data.files import EXTENSIONS, SPLITS, image_files, is_image
from spot.data.picture import open_image, photo_transform
from spot.data.shards import Shards, shards_of
from spot.errors import InputError, unknown

if TYPE_CHECKING:
    from spot.data.scenes import Scenes

Transform = Callable[[Image.Image], Tensor]
Sample = tuple[Tensor, int, str]
Unreadable = Literal["stop", "skip"]

TIMM = re.compile(r"(torch|hfds|wds)/.+")
KAGGLE = Path("ILSVRC/Data/CLS-LOC")


class Unread(NamedTuple):
    """A placeholder for an image that could not be read."""

    key: str
    reason: str


class Images(Dataset[Sample | None]):
    """Images by index. An unreadable image raises InputError or, with "skip", is None.

    source: source[i] is (image, label); the image is a path, a file or a PIL image.
    skipped: keys of unreadable images so far; complete after a full pass of a `loader`.
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
        """A batch for `Loader`. Errors are returned, because a worker process would raise them with its traceback."""
        return [self.read(index) for index in indices]

    def read(self, index: int) -> Sample | Unread:
        """The sample, or the reason why it could not be read."""
        source, label = self.source[self.order[index]]
        try:
            image = self.transformed(open_image(source), index)
        except InputError as error:
            return Unread(self.keys[index], str(error))
        return image, -1 if label is None else int(label), self.keys[index]

    def transformed(self, image: Image.Image, index: int) -> Tensor:
        """The model's input for the image with this index."""
        return self.transform(image)

    def thin(self, limit: int) -> None:
        """Keep at most `limit` images, evenly spread over the data and thus over its classes."""
        if limit < len(self):
            self.keep([index * len(self) // limit for index in range(limit)])

    def balance(self, limit: int) -> None:
        """Keep an equal number of images per class, at most `limit` in total, evenly spread over each class."""
        classes: dict[Any, list[int]] = {}
        for index, number in enumerate(self.order):
            classes.setdefault(self.source[number][1], []).append(index)
        each = min(limit // len(classes), min(map(len, classes.values())))
        if each < 1:
            raise InputError(f"{limit} images are too few for {len(classes)} classes; give a larger limit")
        self.keep([own[place * len(own) // each] for own in classes.values() for place in range(each)])

    def without(self, keys: Collection[str]) -> None:
        """Remove the images with these keys, all of which must exist."""
        left = self._known(keys, "to leave out")
        self.keep([index for index, key in enumerate(self.keys) if key not in left])

    def only(self, keys: Collection[str]) -> None:
        """Keep only the images with these keys, all of which must exist."""
        kept = self._known(keys, "to keep")
        self.keep([index for index, key in enumerate(self.keys) if key in kept])

    def _known(self, keys: Collection[str], why: str) -> set[str]:
        if missing := set(keys).difference(self.keys):
            raise InputError(f"there is no image {min(missing)} {why}, nor {len(missing) - 1} others")
        return set(keys)

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only the images with these indices."""
        self.order = [self.order[index] for index in indices]
        self.keys = [self.keys[index] for index in indices]

    def leave_out(self, unread: Unread) -> None:
        """Record an unreadable image as skipped, or raise InputError."""
        if self.unreadable == "stop":
            raise InputError(
                f"{unread.reason} ({unread.key}); unreadable='skip' (--skip-unreadable) goes on without it"
            )
        if unread.key not in self.skipped:
            self.skipped.append(unread.key)


def data_for(model: Any, path_or_name: str | Path, *, limit: int | None = None, **options: Any) -> "Data":
    """Open data for evaluation of a model: with its size, mean, std and class indices.

    path_or_name, limit, options (split, unreadable, root): as for `open_data`; or "scenes", "needle" or "needle:256",
        the built-in data.
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
    return open_data(path_or_name, **options)


def open_data(
    path_or_name: str | Path,
    *,
    transform: Transform,
    split: str = "val",
    unreadable: Unreadable = "stop",
    classes: Sequence[str] | int | None = None,
    limit: int | None = None,
    leave_out: Path | None = None,
    root: str | Path | None = None,
) -> Images:
    """Open an image folder or a timm data set by name.

    split: "val", "train" or "test", if the data has several.
    classes: the model's class folders (`class_folders(model)`), so that labels are the model's
        indices, even if the data has only some of the classes. None: sorted folders, from 0.
    limit: maximum number of images, evenly spread over the data and thus over its classes.
    leave_out: a file that names images to exclude; see `listed`.
    root: folder of a timm data set's files.
    """
    if limit is not None and limit < 1:
        raise InputError(f"at least one image is needed, got a limit of {limit}")
    if TIMM.fullmatch(str(path_or_name)) and not Path(path_or_name).is_dir():
        source, keys, known = timm_data(str(path_or_name), split, root)
        count = classes if isinstance(classes, int) else len(classes or known)
        if known and len(known) != count:
            raise InputError(f"{path_or_name} has {len(known)} classes, the model {count}")
        if classes is not None and isinstance(source, Shards):
            highest = max(entry.label for entry in source.entries)
            if highest >= count:
                raise InputError(f"{path_or_name} has class {highest}, the model's are 0 to {count - 1}")
    else:
        source, keys, known = image_folder(Path(path_or_name), split, classes)
    data = Images(source, keys, known, transform=transform, unreadable=unreadable)
    if leave_out is not None:
        data.without(listed(leave_out))
    if limit is not None:
        data.thin(limit)
    return data


def listed(file: Path) -> list[str]:
    """Read keys from a file: one per line, as paths relative to the data's root."""
    if not file.is_file():
        raise InputError(f"there is no file {file} that names images, one a line, as paths below the data's root")
    return [line for line in file.read_text(errors="surrogateescape").splitlines() if line]


def image_folder(root: Path, split: str, classes: Sequence[str] | int | None) -> tuple[Any, list[str], list[str]]:
    """The images of a folder and its sub-folders: source, keys and classes of `Images`. Keys are relative to `root`."""
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
        wnids = {}  # labels of Kaggle's validation images, which have no class folders
        if answers.is_file():
            with answers.open(newline="") as file:
                wnids = {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
        indices = class_indices(sorted(set(wnids.values())), classes) if wnids else {}
        samples = [(file, indices.get(wnids.get(Path(file).stem, ""), -1)) for file in files]
    if not samples:
        raise InputError(f"there is no image in {top}; images end in {', '.join(EXTENSIONS)}")
    keys = [Path(file).relative_to(root).as_posix() for file, _ in samples]
    known = list(indices) if classes is None or isinstance(classes, int) else list(classes)
    return samples, keys, known


def subfolders(folder: Path) -> list[str]:
    """Names of the visible sub-folders, sorted by code point like in torchvision and timm."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")


def split_folder(root: Path, split: str) -> Path:
    """The folder of a split, such as root/val, or root itself if it has no split folders.

    A split folder must contain folders, so that a class may be called `train`.
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


def timm_data(name: str, split: str, root: str | Path | None) -> tuple[Any, list[str], list[str]]:
    """A data set by its name in timm.data.create_dataset, or the shards of `wds/FOLDER`: as `image_folder`."""
    kind, _, rest = name.partition("/")
    if kind == "wds":
        shards = Shards(*shards_of(Path(rest if root is None else root), split))
        return shards, shards.keys, []
    from timm.data import create_dataset

    if kind == "hfds" and find_spec("datasets") is None:  # otherwise timm prints its own message
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
    source: Any = getattr(data, "reader", data)  # the inner reader, because timm's wrapper replaces unreadable images
    indices = getattr(source, "class_to_idx", None) or {}
    classes = [str(label) for label in sorted(indices, key=lambda label: indices[label])]
    return source, [f"{index:08d}" for index in range(len(source))], classes


Data = Union[Images, "Scenes"]
