"""Where studies take saliency maps from: the masks of scenes, a folder, a network, or the image itself."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from spot.data.picture import evaluation_transform
from spot.data.scenes import Scenes
from spot.evaluation.accuracy import Maps
from spot.models.spot_vit import SpotViT
from spot.placement.saliency import KeyedSaliency, resolve_saliency


def maps_for(source: str, model: SpotViT, data: str) -> Maps:
    """Maps (B, H, W) of images as the model sees them, by their keys in the data."""
    if source == "masks":
        return KeyedSaliency(lambda images, keys: scene_masks(keys).to(images.device), "masks")
    config = model.data_config
    return resolve_saliency(source, config, evaluation_transform(config), data)


def maps_identity(source: str) -> str:
    """The source's name, and for files a hash of what they are."""
    path, text = Path(source), source
    if path.is_file():
        text = hashlib.sha256(path.read_bytes()).hexdigest()
    elif path.is_dir():
        text = " ".join(f"{each.relative_to(path)} {each.stat().st_size}" for each in sorted(path.rglob("*.png")))
    return f"{path.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def scene_masks(keys: Sequence[str]) -> Tensor:
    """The object's mask (B, H, W) of scenes, by key."""
    split = keys[0].partition("/")[0]
    return Scenes(split).draw([int(key.rpartition("/")[2]) for key in keys]).masks
