"""The names of a model's classes, and the class index of each image folder."""

from collections.abc import Sequence
from typing import Any

from spot.errors import InputError, unknown


def class_folders(model: Any) -> list[str] | int:
    """Folder names of a model's classes, in order (ImageNet's wnids), or the number of classes."""
    return [folder for folder, _ in known_classes(model)] or int(model.num_classes)


def class_names(model: Any) -> list[str] | None:
    """Readable names of the model's classes, in order; None if the model has no names."""
    return [name for _, name in known_classes(model)] or None


def known_classes(model: Any) -> list[tuple[str, str]]:
    """Folder and name of each class, from timm's description of the weights or from ImageNet."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    config = getattr(getattr(model, "vit", model), "pretrained_cfg", None) or {}  # of the inner ViT, or of a timm model
    if config.get("label_names"):
        descriptions = config.get("label_descriptions") or {}
        return [(folder, descriptions.get(folder, folder)) for folder in config["label_names"]]
    subset = infer_imagenet_subset(model)
    info = ImageNetInfo(subset) if subset else None
    return list(zip(info.label_names(), info.label_descriptions(), strict=True)) if info else []


def class_indices(folders: Sequence[str], classes: Sequence[str] | int | None) -> dict[str, int]:
    """Map class folders to class indices. A folder named by a number (ImageNet-V2) has that index."""
    count = classes if isinstance(classes, int) else len(folders if classes is None else classes)
    if classes is not None and all(name.isdecimal() and int(name) < count for name in folders):
        return {name: int(name) for name in folders}
    if isinstance(classes, int) and len(folders) != count:
        raise InputError(f"the model has {count} unnamed classes, the data {len(folders)} class folders")
    known = folders if classes is None or isinstance(classes, int) else classes
    indices = {name: index for index, name in enumerate(known)}
    for name in folders:
        if name not in indices:
            raise unknown("class", name, known, hint="class folders must have the names of the model's classes")
    return {name: indices[name] for name in folders}
