"""Images from folders and timm data sets, as (image, label, key).

`data_for(model, path)` opens data with a model's evaluation transform, `open_data` with any
transform. Both yield samples `(image (C, H, W), label, key)`. The key identifies an image in
results and placements: its path relative to the data root, with forward slashes, or its number in
a timm data set. The label is the model's class index, or -1 for data without labels.

Folders have one sub-folder per class, ImageNet's layout `val/<wnid>/` and `train/<wnid>/` or that
of Kaggle, or images without labels (`folders.py`). `wds/FOLDER` contains WebDataset shards
(`shards.py`). timm opens names such as `torch/cifar10` and `hfds/…`. An unreadable file stops the
run, unless `skip=True`.
"""

import re
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import Normalize

from spot.data.classes import class_folders
from spot.data.difficulty import difficulty_of
from spot.data.folders import labelled_files, read_keys
from spot.data.picture import evaluation_transform, open_image
from spot.data.shards import Shards, open_shards
from spot.errors import InputError

if TYPE_CHECKING:
    from spot.data.scenes import Scenes

Transform = Callable[[Image.Image], Tensor]
Sample = tuple[Tensor, int, str]

TIMM = re.compile(r"(torch|hfds|wds)/.+")


class Unread(NamedTuple):
    """A placeholder for an image that could not be read."""

    key: str
    reason: str


class Images(Dataset[Sample | None]):
    """Images by index. An unreadable image raises InputError or, with `skip`, is None.

    source: source[i] is (image, label); the image is a path, a file or a PIL image.
    skipped: keys of unreadable images so far; complete after a full pass of a `loader`.
    """

    def __init__(
        self, source: Any, keys: Sequence[str], classes: list[str], *, transform: Transform, skip: bool = False
    ) -> None:
        self.source, self.keys, self.classes = source, keys, classes
        self.order: Sequence[int] = range(len(keys))  # of the images in use, as indices of the source
        self.transform, self.skip = transform, skip
        self.skipped: list[str] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Sample | None:
        sample = self.read(index)
        if not isinstance(sample, Unread):
            return sample
        self.note_unread(sample)
        return None

    def __getitems__(self, indices: Sequence[int]) -> list[Sample | Unread]:
        """A batch for `Loader`. Errors are returned, because a worker process would raise them with its traceback."""
        return [self.read(index) for index in indices]

    def read(self, index: int) -> Sample | Unread:
        """The sample, or the reason why it could not be read."""
        source, label = self.source[self.order[index]]
        try:
            image = self.transform(open_image(source))
        except InputError as error:
            return Unread(self.keys[index], str(error))
        return image, -1 if label is None else int(label), self.keys[index]

    def note_unread(self, unread: Unread) -> None:
        """Add an unreadable image to `skipped`, or raise InputError."""
        if not self.skip:
            raise InputError(f"{unread.reason} ({unread.key}); skip=True (--skip-unreadable) continues without it")
        if unread.key not in self.skipped:
            self.skipped.append(unread.key)

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only the images with these indices."""
        self.order = [self.order[index] for index in indices]
        self.keys = [self.keys[index] for index in indices]

    def thin(self, limit: int) -> None:
        """Keep at most `limit` images, evenly spread over the data and thus over its classes."""
        if limit < len(self):
            self.keep([index * len(self) // limit for index in range(limit)])

    def select(self, keys: Collection[str], *, exclude: bool = False) -> None:
        """Keep only the images with these keys, or exclude them. All keys must exist."""
        named = set(keys)
        if missing := named.difference(self.keys):
            goal = "to leave out" if exclude else "to keep"
            raise InputError(f"there is no image {min(missing)} {goal}, nor {len(missing) - 1} others")
        self.keep([index for index, key in enumerate(self.keys) if (key in named) != exclude])


def data_for(model: Any, path_or_name: str | Path, *, limit: int | None = None, **options: Any) -> "Data":
    """Open data for evaluation of a model: with its size, mean, std and class indices.

    path_or_name: as for `open_data`; or "scenes", "needle" or "needle:256", the built-in data.
    limit, options (split, skip, root, classes): as for `open_data`. Labels are the model's class indices, unless other
        classes are given.
    """
    from spot.data.scenes import Scenes

    config = model.data_config
    difficulty = difficulty_of(path_or_name)
    if difficulty is not None:
        split = options.get("split", "val")
        split = "validation" if split == "val" else split
        return Scenes(split, limit, difficulty=difficulty, transform=Normalize(config["mean"], config["std"]))
    transform = evaluation_transform(config, fit=getattr(model, "fit", "crop"))
    return open_data(path_or_name, transform=transform, limit=limit, **{"classes": class_folders(model), **options})


def open_data(
    path_or_name: str | Path,
    *,
    transform: Transform,
    split: str = "val",
    skip: bool = False,
    classes: Sequence[str] | int | None = None,
    limit: int | None = None,
    leave_out: Path | None = None,
    root: str | Path | None = None,
) -> Images:
    """Open an image folder or a timm data set by name.

    split: "val", "train" or "test", if the data has several.
    skip: skip unreadable images.
    classes: the model's class folders (`class_folders(model)`), so that labels are the model's
        indices, even if the data has only some of the classes. None: sorted folders, from 0.
    limit: maximum number of images, evenly spread over the data and thus over its classes.
    leave_out: a file that names images to exclude; one key per line.
    root: folder of a timm data set's files.
    """
    if limit is not None and limit < 1:
        raise InputError(f"at least one image is needed, got a limit of {limit}")
    if TIMM.fullmatch(str(path_or_name)) and not Path(path_or_name).is_dir():
        source, keys, names = timm_data(str(path_or_name), split, root)
        count = classes if isinstance(classes, int) else len(classes or names)
        if names and len(names) != count:
            raise InputError(f"{path_or_name} has {len(names)} classes, the model {count}")
        if classes is not None and isinstance(source, Shards):
            highest = max(entry.label for entry in source.entries)
            if highest >= count:
                raise InputError(f"{path_or_name} has class {highest}, the model's are 0 to {count - 1}")
    else:
        source, names = labelled_files(Path(path_or_name), split, classes)
        keys = [Path(file).relative_to(path_or_name).as_posix() for file, _ in source]
    data = Images(source, keys, names, transform=transform, skip=skip)
    if leave_out is not None:
        data.select(read_keys(leave_out), exclude=True)
    if limit is not None:
        data.thin(limit)
    return data


def timm_data(name: str, split: str, root: str | Path | None) -> tuple[Any, list[str], list[str]]:
    """Source, keys and classes of a data set by its name in timm.data.create_dataset, or of the shards `wds/FOLDER`."""
    kind, _, rest = name.partition("/")
    if kind == "wds":
        shards = open_shards(Path(rest if root is None else root), split)
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
