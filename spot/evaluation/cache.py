"""A cache of results: one file per entry, named by a hash of everything that determines the result.

The hash (of `about`) covers the weights, the positions on one fixed image (and thus every constant of a prior), the
budget, the seed, the image files and the saliency maps. A change of any of these gives another file. kNN banks and
the studies of paper/ are cached this way.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spot.data.images import Data
from spot.data.scenes import Scenes
from spot.data.shards import Shards
from spot.evaluation.accuracy import Setting
from spot.hashes import hash_file, hash_json, hash_tensors
from spot.placement.files import Placements
from spot.store import encode_names


def entry_path(folder: str | Path, about: Mapping[str, Any]) -> Path:
    """The path of a cache entry in a folder, with a readable name and a hash of `about`."""
    words = [str(about[name]) for name in ("name", "placement", "tokens", "seed") if about.get(name) is not None]
    words = [re.sub(r"[^A-Za-z0-9_.-]+", "-", word) for word in words]
    return Path(folder) / str(about["kind"]) / f"{'-'.join([*words, hash_json(about)[:12]])}.safetensors"


def determinants(setting: Setting, weights: str, images: str, maps: str = "") -> dict[str, Any]:
    """Everything that determines the result of a setting, as JSON.

    Args:
        weights: `hash_model` of the setting's SpotViT.
        images: `hash_images` of the images, and their transform.
        maps: `hash_maps` of the saliency maps; ignored for priors that need none.
    """
    return {
        "model": type(setting.model).__name__,
        "weights": weights,
        "placement": setting.label,
        "tokens": setting.budget,
        "seed": setting.seed,
        "places": hash_places(setting),
        "images": images,
        "maps": maps if setting.needs_map else "",
    }


@torch.no_grad()
def hash_places(setting: Setting) -> str:
    """Hash a setting's positions: the given ones, or those on one fixed image with a fixed saliency map."""
    if isinstance(setting.placement, Placements):
        given = setting.placement
        return hash_tensors({"positions": given.positions, "keys": encode_names(given.keys)})
    height, width = setting.bound.spot_vit.img_size
    ramp = torch.linspace(0.1, 1, height)[:, None] * torch.linspace(1, 0.1, width)
    image = ramp.expand(1, 3, height, width).to(next(setting.bound.parameters()).device)
    return hash_tensors({"positions": setting.place(image, ["probe"], ramp[None])})


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


def spot_version() -> str:
    from spot import __version__

    return __version__
