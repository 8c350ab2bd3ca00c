"""spot saliency: maps of what stands out, for images or a whole data set, as PNG files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = "saliency.json"  # in the folder of maps: what made them


def saliency(
    images: tyro.conf.Positional[tuple[Path, ...]] = (),
    /,
    *,
    data: str | None = None,
    out: Path = Path("saliency"),
    method: str = "spectral",
    prompt: str | None = None,
    split: str = "val",
    data_root: Path | None = None,
    limit: int | None = None,
    unreadable: Literal["stop", "skip"] = "stop",
    json: Path | None = None,
) -> None:
    """Make saliency maps, one grey PNG of the image's size per image, for priors and the saliency gain.

    Maps of a data set keep its folders, so that they are found by image name; what is already there
    is not made again. Use them with spot search or spot evaluate: --prior salient --saliency FOLDER.

    Args:
        images: photographs.
        data: a folder of images or a timm data set, instead of single images.
        out: the folder of the maps.
        method: spectral (no weights), clipseg, or an .onnx file of a salient-object network.
        prompt: for clipseg, what to look for; "class" takes the name of each image's class folder.
        split: val, train or test, where the data has several.
        data_root: where a timm data set keeps its files.
        limit: at most so many images, evenly spread over the classes.
        unreadable: stop at an image that cannot be read, or skip it and count it.
        json: write the table to this file.

    example: spot saliency --data imagenet --method u2netp.onnx --out maps
    """
    from torchvision.transforms import ToTensor

    from spot import report
    from spot.data.images import Images, open_data
    from spot.errors import InputError

    if bool(images) == (data is not None):
        raise InputError("give either images or --data, one of them")
    if prompt is not None and method != "clipseg":
        raise InputError(f"--prompt goes with --method clipseg, not {method}")
    compute = opened(method, prompt)
    if data is None:
        photographs = [(str(path), -1) for path in images]
        keys = [path.name for path in images]
        found = Images(photographs, keys, [], transform=ToTensor(), unreadable=unreadable)
    else:
        opened_data = open_data(
            data, transform=ToTensor(), split=split, unreadable=unreadable, limit=limit, root=data_root
        )
        if not isinstance(opened_data, Images):
            raise InputError(f"{data} is a stream, whose images have no names to keep maps under")
        found = opened_data
    describe(out, method, prompt)
    rows = write_maps(found, out, compute)
    report.show(rows if data is None else total(rows, len(found), out), method)
    if json is not None:
        report.save_json(json, rows, {"method": method, "prompt": prompt, "out": str(out)})


def opened(method: str, prompt: str | None) -> "Callable[[Tensor, str], Tensor]":
    """A function of one RGB image (1, 3, H, W) in [0, 1] and its key."""
    from spot.placement.saliency import ClipSeg, open_saliency

    if method == "clipseg" and prompt is not None:
        model = ClipSeg() if prompt == "class" else ClipSeg(prompt)
        return lambda image, key: model(image, [class_prompt(key)] if prompt == "class" else None)
    plain = open_saliency(method)
    return lambda image, key: plain(image)


def class_prompt(key: str) -> str:
    """The name of an image's class folder in words: ImageNet's word for a wnid, else the folder's name."""
    from timm.data import ImageNetInfo

    from spot.errors import InputError

    folder = Path(key).parent.name
    if not folder:
        raise InputError(f"--prompt class needs class folders, but {key} is in none")
    info = ImageNetInfo()
    if folder in info.label_names():
        return info.label_name_to_description(folder).split(",")[0]
    return folder.replace("_", " ")


def describe(out: Path, method: str, prompt: str | None) -> None:
    """Say in the folder what makes its maps; refuse to mix two ways of making them."""
    from json import dumps, loads

    from spot.errors import InputError
    from spot.store import whole

    about = {"method": Path(method).name, "prompt": prompt}
    file = out / ABOUT
    if file.exists():
        try:
            there = loads(file.read_text())
        except ValueError:
            there = None
        if there != about:
            raise InputError(f"{out} holds maps made with {there}, not {about}; choose another --out")
        return
    with whole(file) as temporary:
        temporary.write_text(dumps(about) + "\n")


def write_maps(data: Any, out: Path, compute: "Callable[[Tensor, str], Tensor]") -> list[dict[str, Any]]:
    """Make the maps that are not there yet, each file whole or not at all."""
    from PIL import Image

    from spot import report
    from spot.placement.saliency import map_path
    from spot.store import whole

    files = distinct_files(data.keys, out)
    todo = [index for index, file in enumerate(files) if not file.exists()]
    rows = []
    for index in report.track(todo, "saliency"):
        sample = data[index]
        if sample is None:
            continue
        image, _, key = sample
        found = compute(image[None], key)[0]
        file = map_path(out, key)
        with whole(file) as temporary:
            Image.fromarray((found * 255).round().byte().cpu().numpy()).save(temporary)
        share = (found > 0.5).float().mean().item()
        rows.append({"image": key, "mean": found.mean().item(), "above half %": 100 * share, "map": str(file)})
    return rows


def distinct_files(keys: Sequence[str], out: Path) -> list[Path]:
    """Where each image's map goes; refused if two images would share one."""
    from spot.errors import InputError
    from spot.placement.saliency import map_path

    owners: dict[Path, str] = {}
    for key in keys:
        file = map_path(out, key)
        if file in owners:
            raise InputError(f"{owners[file]} and {key} would have the same map, {file}; rename one of them")
        owners[file] = key
    return list(owners)


def total(rows: list[dict[str, Any]], count: int, out: Path) -> list[dict[str, Any]]:
    """One row for a whole data set."""
    mean = sum(row["mean"] for row in rows) / len(rows) if rows else None
    share = sum(row["above half %"] for row in rows) / len(rows) if rows else None
    return [{"images": count, "made now": len(rows), "mean": mean, "above half %": share, "maps": str(out)}]
