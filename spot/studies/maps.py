"""Where studies take saliency maps from: the masks of scenes, a folder, a network, or the image itself."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from spot.data.picture import evaluation_transform
from spot.data.scenes import Scenes
from spot.evaluation.accuracy import Maps
from spot.models.spot_vit import SpotViT
from spot.placement.saliency import KeyedSaliency, resolve_saliency
from spot.store import hash_file, hash_json, hash_listing


def maps_for(source: str, model: SpotViT, data: str) -> Maps:
    """Maps (B, H, W) of images as the model sees them, by their keys in the data."""
    if source == "masks":
        return KeyedSaliency(lambda images, keys: scene_masks(keys).to(images.device), "masks")
    config = model.data_config
    return resolve_saliency(source, config, evaluation_transform(config), data)


def maps_identity(source: str) -> str:
    """The source's name, and for files a hash of what they are."""
    path, content = Path(source), source
    if path.is_file():
        content = hash_file(path)
    elif path.is_dir():
        content = hash_listing(path, "*.png")
    return f"{path.name} {hash_json(content)[:12]}"


def scene_masks(keys: Sequence[str]) -> Tensor:
    """The object's mask (B, H, W) of scenes, by key."""
    split = keys[0].partition("/")[0]
    return Scenes(split).draw([int(key.rpartition("/")[2]) for key in keys]).masks
