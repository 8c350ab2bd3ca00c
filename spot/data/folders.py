"""Image files in folders: their order, splits and classes. Does not import torch."""

import csv
import os
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from spot.errors import InputError, unknown

# The extensions of torchvision, and three more.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif", ".jfif")
# The names of splits, in folders and in shards.
SPLITS = {"val": ("val", "validation", "valid", "eval"), "train": ("train", "training"), "test": ("test",)}
KAGGLE = Path("ILSVRC/Data/CLS-LOC")


def is_image(path: str) -> bool:
    """Whether the file has an image suffix. Hidden files, such as the ._ files of macOS, do not count."""
    return path.lower().endswith(EXTENSIONS) and not os.path.basename(path).startswith(".")


def image_files(folder: str | Path) -> list[str]:
    """List the images of a folder and its sub-folders, in torchvision's order. Follows links, but no folder twice."""
    files: list[tuple[str, str]] = []
    visited = {os.path.realpath(folder)}
    for path, folders, names in os.walk(folder, followlinks=True):
        for name in sorted(folders):
            target = os.path.realpath(os.path.join(path, name))
            if target in visited:
                folders.remove(name)
            visited.add(target)
        files += [(path, name) for name in names if is_image(name)]
    return [os.path.join(*file) for file in sorted(files)]


def photo_files(sources: Sequence[str | Path]) -> list[Path]:
    """List the image files in files, folders (with sub-folders) and patterns such as 'photos/*.jpg'."""
    files: list[Path] = []
    for source in map(str, sources):
        if os.path.isdir(source):
            found, problem = image_files(source), f"there is no image in {source}"
        elif os.path.exists(source):
            found, problem = [source], ""
        elif any(letter in source for letter in "*?["):
            found = [file for file in sorted(glob(source, recursive=True)) if is_image(file)]
            problem = f"no image matches {source}"
        else:
            found, problem = [], f"an image file was expected, but {source} is missing"
        if not found:
            raise InputError(problem)
        files += map(Path, found)
    if not files:
        raise InputError("name at least one image file or folder")
    return list(dict.fromkeys(files))


def read_keys(file: Path) -> list[str]:
    """Read keys from a file: one per line, as paths relative to the data's root."""
    if not file.is_file():
        raise InputError(f"there is no file {file} that names images, one a line, as paths below the data's root")
    return [line for line in file.read_text(errors="surrogateescape").splitlines() if line]


def labelled_files(
    root: Path, split: str, classes: Sequence[str] | int | None
) -> tuple[list[tuple[str, int]], list[str]]:
    """The images (file, class index or -1) of a split, and the names of its classes; `classes` as in `open_data`."""
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
        solution = root / f"LOC_{split}_solution.csv"
        wnids = {}  # labels of Kaggle's validation images, which have no class folders
        if solution.is_file():
            with solution.open(newline="") as file:
                wnids = {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
        indices = class_indices(sorted(set(wnids.values())), classes) if wnids else {}
        samples = [(file, indices.get(wnids.get(Path(file).stem, ""), -1)) for file in files]
    if not samples:
        raise InputError(f"there is no image in {top}; images end in {', '.join(EXTENSIONS)}")
    return samples, list(indices) if classes is None or isinstance(classes, int) else list(classes)


def class_indices(folders: Sequence[str], classes: Sequence[str] | int | None) -> dict[str, int]:
    """Map class folders to class indices. A folder named by a number (ImageNet-V2) has that index."""
    if classes is None:
        return {name: index for index, name in enumerate(folders)}
    count = classes if isinstance(classes, int) else len(classes)
    if all(name.isdecimal() and int(name) < count for name in folders):
        return {name: int(name) for name in folders}
    if isinstance(classes, int):
        if len(folders) != count:
            raise InputError(f"the model has {count} unnamed classes, the data {len(folders)} class folders")
        return {name: index for index, name in enumerate(folders)}
    indices = {name: index for index, name in enumerate(classes)}
    for name in folders:
        if name not in indices:
            raise unknown("class", name, classes, hint="class folders must have the names of the model's classes")
    return {name: indices[name] for name in folders}


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
    found = [name for name in names if (root / name).is_dir() and subfolders(root / name)]
    for name in SPLITS[split]:
        if name in found:
            return root / name
    if found:
        raise InputError(f"{root} holds {', '.join(found)}, but no {split}; name the split you want")
    return root
