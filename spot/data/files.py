"""Image files in folders and patterns, by their suffix. Does not import torch."""

import os
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from spot.errors import InputError

# The extensions of torchvision, and three more.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif", ".jfif")
# The names of splits, in folders and in shards.
SPLITS = {"val": ("val", "validation", "valid", "eval"), "train": ("train", "training"), "test": ("test",)}


def photo_files(sources: Sequence[str | Path]) -> list[Path]:
    """List the image files in files, folders (with sub-folders) and patterns such as 'photos/*.jpg'."""
    files: list[Path] = []
    for source in map(str, sources):
        if os.path.isdir(source):
            inside, problem = image_files(source), f"there is no image in {source}"
        elif os.path.exists(source):
            inside, problem = [source], ""
        elif any(letter in source for letter in "*?["):
            inside = [file for file in sorted(glob(source, recursive=True)) if is_image(file)]
            problem = f"no image matches {source}"
        else:
            inside, problem = [], f"an image file was expected, but {source} is missing"
        if not inside:
            raise InputError(problem)
        files += map(Path, inside)
    if not files:
        raise InputError("name at least one image file or folder")
    return list(dict.fromkeys(files))


def image_files(folder: str | Path) -> list[str]:
    """List the images of a folder and its sub-folders, in torchvision's order. Follows links, but no folder twice."""
    files: list[tuple[str, str]] = []
    known = {os.path.realpath(folder)}
    for path, folders, names in os.walk(folder, followlinks=True):
        real = {name: os.path.realpath(os.path.join(path, name)) for name in sorted(folders)}
        new = {there: name for name, there in reversed(real.items()) if there not in known}
        known |= new.keys()
        folders[:] = new.values()
        files += [(path, name) for name in names if is_image(name)]
    return [os.path.join(*file) for file in sorted(files)]


def is_image(path: str) -> bool:
    """Whether the file has an image suffix. Hidden files, such as the ._ files of macOS, do not count."""
    return path.lower().endswith(EXTENSIONS) and not os.path.basename(path).startswith(".")
