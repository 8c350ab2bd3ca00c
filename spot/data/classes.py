"""The folders and names of a model's classes."""

from typing import Any


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
