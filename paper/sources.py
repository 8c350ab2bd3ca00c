"""The images and saliency maps that the settings of studies name."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from paper.settings import SCENES, StudySettings
from spot.data.classes import class_folders
from spot.data.difficulty import Difficulty, difficulty_of
from spot.data.folders import read_keys
from spot.data.images import Data, Images, data_for
from spot.data.scenes import CLASSES, Scenes
from spot.data.shards import Shards
from spot.errors import InputError
from spot.evaluation.accuracy import Maps
from spot.hashes import hash_file, hash_json
from spot.models.spot_vit import SpotViT
from spot.placement.saliency import SaliencyMaps, map_macs, maps_about, resolve_saliency


class Sources:
    """The images and saliency maps of a study, preprocessed for each model. A folder is listed once."""

    def __init__(self, settings: StudySettings) -> None:
        self.settings = settings
        self._listed: dict[Any, Data] = {}
        self._hashes: dict[Any, str] = {}

    def images(self, model: SpotViT, *, oracle: bool = False) -> Any:
        """The images, preprocessed for a model; with `oracle`, those for the search."""
        given = self.settings
        if model.num_classes == 0:
            raise InputError(f"{model.name} has no classifier, and studies need its predictions")
        if given.scenes and model.num_classes != len(CLASSES):
            raise InputError(
                f"{model.name} knows {model.num_classes} classes, the scenes are of {len(CLASSES)}; give --data"
            )
        limit = given.oracle_limit if oracle and given.scenes else given.limit
        data = self._open(model, given.data, given.split, limit, given.root)
        if oracle and isinstance(data, Images) and given.oracle_limit is not None:
            data.thin(given.oracle_limit)
        return data

    def bank(self, model: SpotViT) -> Any:
        """The labelled images for kNN banks and for calibrating cascades; with a limit, the same number per class."""
        bank, limit = str(self.settings.bank), self.settings.bank_limit
        data = self._open(model, bank, "train", limit if difficulty_of(bank) else None, None)
        if isinstance(data, Images):
            if self.settings.bank_keep is not None:
                data.select(read_keys(self.settings.bank_keep))
            if limit is not None:
                balance(data, limit)
        return data

    def _open(self, model: SpotViT, name: str, split: str, limit: int | None, root: str | Path | None) -> Data:
        classes = class_folders(model)
        key = (name, split, limit, classes if isinstance(classes, int) else tuple(classes))
        if key not in self._listed:
            self._listed[key] = data_for(model, name, split=split, limit=limit, root=root)
        data = self._listed[key]
        if not isinstance(data, Images):
            return data_for(model, name, split=split, limit=limit, root=root)
        data = copy.copy(data)
        data.transform, data.skipped = model.transform(), []
        return data

    def saliency(self, model: SpotViT, data: str = "") -> Maps:
        """A function that returns maps (B, H, W) for preprocessed images and their keys in the data."""
        source = self.settings.saliency
        if source == "masks":
            known = data or self.settings.data
            return SaliencyMaps(lambda images, keys: scene_masks(keys, known).to(images.device), "masks")
        return resolve_saliency(source, model, data or self.settings.data)

    def images_hash(self, model: SpotViT, *, oracle: bool = False, bank: bool = False) -> str:
        """A hash of the images' files and of the model's preprocessing."""
        config = {name: str(value) for name, value in model.data_config.items()}
        key = (str(config), oracle, bank)
        if key not in self._hashes:
            data = self.bank(model) if bank else self.images(model, oracle=oracle)
            self._hashes[key] = hash_json([hash_images(data), config])
        return self._hashes[key]

    def maps_cost(self) -> int | None:
        """Multiply-adds of one map; None if unknown, as for the masks of scenes."""
        return None if self.settings.saliency == "masks" else map_macs(self.settings.saliency)

    def maps_name(self) -> str:
        """The method of the maps, with its prompt; a folder of maps records it."""
        source = Path(self.settings.saliency)
        about = maps_about(source)
        if "method" not in about:
            return source.name
        return about["method"] if about.get("prompt") is None else f"{about['method']}, prompt “{about['prompt']}”"

    def maps_hash(self) -> str:
        if "maps" not in self._hashes:
            self._hashes["maps"] = hash_maps(self.settings.saliency)
        return self._hashes["maps"]


def balance(data: Images, limit: int) -> None:
    """Keep an equal number of images per class, at most `limit` in total, evenly spread over each class."""
    classes: dict[Any, list[int]] = {}
    for index, number in enumerate(data.order):
        classes.setdefault(data.source[number][1], []).append(index)
    count = min(limit // len(classes), min(map(len, classes.values())))
    if count < 1:
        raise InputError(f"{limit} images are too few for {len(classes)} classes; give a larger limit")
    data.keep([members[place * len(members) // count] for members in classes.values() for place in range(count)])


def scene_masks(keys: Sequence[str], data: str = SCENES) -> Tensor:
    """Object masks (B, H, W) of scenes, by key and the name of their data set."""
    split, difficulty = keys[0].partition("/")[0], difficulty_of(data) or Difficulty()
    return Scenes(split, difficulty=difficulty).draw([int(key.rpartition("/")[2]) for key in keys]).masks


def hash_images(data: Data) -> str:
    """Hash a data set: it changes when an image is added, removed, renamed or rewritten."""
    if isinstance(data, Scenes):
        return hash_json(["scenes", data.split, data.seed, data.length, str(data.difficulty)])
    about: list[Any] = data.source.state() if isinstance(data.source, Shards) else []
    for key, index in zip(data.keys, data.order, strict=True):
        about.append(key)
        if isinstance(data.source, list):  # files; a timm data set has only keys
            path, label = data.source[index]
            state = Path(path).stat()
            about += [label, state.st_size, state.st_mtime_ns]
    return hash_json(about)


def hash_maps(source: str) -> str:
    """The name of a source of saliency maps, with a hash of its files."""
    path, content = Path(source), source
    if path.is_file():
        content = hash_file(path)
    elif path.is_dir():
        files = [(file, file.stat()) for file in sorted(path.rglob("*.png"))]
        listing = [[str(file.relative_to(path)), state.st_size, state.st_mtime_ns] for file, state in files]
        content = hash_json(listing)
    return f"{path.name} {hash_json(content)[:12]}"
