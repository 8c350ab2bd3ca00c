"""Saliency maps as files: one grey PNG of the image's size per image, found again by the image's name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor

from spot import report
from spot.data.images import Images
from spot.errors import InputError
from spot.placement.map_cost import ABOUT, map_macs
from spot.placement.saliency import ClipSeg, map_path, open_saliency
from spot.store import read_json, whole, write_json


def write_maps(data: Images, out: Path, method: str, prompt: str | None = None) -> list[dict[str, Any]]:
    """Make the maps that are not there yet, each file whole or not at all; a row for each that was made.

    data: images (3, H, W) in [0, 1], of any size.
    method, prompt: see `spot.placement.saliency.open_saliency`; the prompt "class" is the name of each
        image's class folder.
    """
    saliency = keyed(method, prompt)
    files = distinct_files(data.keys, out)
    describe(out, method, prompt)
    todo = [index for index, file in enumerate(files) if not file.exists()]
    rows = []
    for index in report.track(todo, "saliency"):
        sample = data[index]
        if sample is None:
            continue
        image, _, key = sample
        made = saliency(image[None], key)[0]
        with whole(files[index]) as temporary:
            Image.fromarray((made * 255).round().byte().cpu().numpy()).save(temporary)
        share = (made > 0.5).float().mean().item()
        rows.append({"image": key, "mean": made.mean().item(), "above half %": 100 * share, "map": str(files[index])})
    return rows


def keyed(method: str, prompt: str | None) -> Callable[[Tensor, str], Tensor]:
    """A function of one RGB image (1, 3, H, W) in [0, 1] and its key."""
    if prompt is not None and method != "clipseg":
        raise InputError(f"got prompt={prompt!r} for {method}; pass method=clipseg, which goes with it")
    if prompt is None:
        plain = open_saliency(method)
        return lambda image, key: plain(image)
    model = ClipSeg() if prompt == "class" else ClipSeg(prompt)
    return lambda image, key: model(image, [class_prompt(key)] if prompt == "class" else None)


def class_prompt(key: str) -> str:
    """The name of an image's class folder in words: ImageNet's word for a wnid, else the folder's name."""
    folder = Path(key).parent.name
    if not folder:
        raise InputError(f"the prompt 'class' needs class folders, but {key} is in none")
    info = ImageNetInfo()
    if folder in info.label_names():
        return info.label_name_to_description(folder).split(",")[0]
    return folder.replace("_", " ")


def describe(out: Path, method: str, prompt: str | None) -> None:
    """Say in the folder what makes its maps and what one costs; refuse to mix two ways of making them."""
    about = {"method": Path(method).name, "prompt": prompt}
    file = out / ABOUT
    there = read_json(file, "what made a folder of maps") if file.exists() else {}
    if "macs" not in there and there in ({}, about):
        write_json(file, {**about, "macs": map_macs(method)})
    elif {name: there.get(name) for name in about} != about:
        raise InputError(f"{out} holds maps made with {there}, not {about}; choose another out=FOLDER")


def distinct_files(keys: Sequence[str], out: Path) -> list[Path]:
    """Where each image's map goes; refused if two images would share one."""
    owners: dict[Path, str] = {}
    for key in keys:
        file = map_path(out, key)
        if file in owners:
            raise InputError(f"{owners[file]} and {key} would have the same map, {file}; rename one of them")
        owners[file] = key
    return list(owners)
