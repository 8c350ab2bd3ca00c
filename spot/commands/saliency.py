"""spot saliency: write saliency maps of images, or of a whole data set, as PNG files."""

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from spot import options, report
from spot.errors import InputError


def saliency(
    images: options.Photos = (),
    /,
    *,
    data: options.DataInstead = None,
    out: Path = Path("saliency"),
    method: str = "spectral",
    choice: Annotated[options.ImageOptions, options.Flat] = options.ImageOptions(),
    json: options.Json = None,
) -> None:
    """Write saliency maps: one grey PNG per image, of the image's size.

    Maps of a data set keep its folders and names. Existing maps are not computed again.
    Use them with spot search or spot evaluate: --prior salient --saliency FOLDER.

    example: spot saliency --data imagenet --method u2netp.onnx --out maps

    Args:
        out: folder for the maps
        method: spectral (needs no weights), an .onnx file of a salient-object network, clipseg, or clipseg:PROMPT;
            with clipseg:class the prompt is the name of each image's class folder
    """
    from torchvision.transforms import ToTensor

    from spot.data.folders import photo_files
    from spot.data.images import Images, open_data
    from spot.placement.saliency import method_and_prompt, write_maps

    if bool(images) == (data is not None):
        raise InputError("give either images or --data, one of them")
    report.check_outputs(json, folder=out)
    opened: Any
    opening = choice.opening()
    if data is None:
        paths = photo_files(images)
        files, names = [(str(path), -1) for path in paths], [path.name for path in paths]
        opened = Images(files, names, [], transform=ToTensor(), skip=opening["skip"])
    else:
        opened = open_data(data, transform=ToTensor(), **opening)
    rows = table = write_maps(opened, out, method)
    if data is not None:
        means = {name: fmean(row[name] for row in rows) if rows else None for name in ("mean", "above half %")}
        table = [{"images": len(opened), "made now": len(rows), **means}]
    report.show(table, method, caption=f"The maps are in {out}.")
    report.save_json(json, rows, {"method": method, "prompt": method_and_prompt(method)["prompt"], "out": str(out)})
