"""spot predict: what is in an image, and which windows the model saw of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

MODEL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def predict(
    images: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="IMAGE ...")],
    /,
    model: str = MODEL,
    weights: Path | None = None,
    prior: str | None = None,
    tokens: int | None = None,
    saliency: str | None = None,
    seed: int = 0,
    top: int = 5,
    out: Path = Path("predictions"),
    json: Path | None = None,
) -> None:
    """Name what is in images, and draw the windows the model saw.

    Args:
        images: image files.
        model: a built-in model, a folder or file that spot saved, a hub id, or a timm name.
        weights: a file with the timm model's weights, instead of downloading them.
        prior: where tokens go; by default as the model says. salient, focus and background need --saliency.
        tokens: how many windows; by default the model's own.
        saliency: spectral, clipseg or an .onnx file.
        seed: of priors that draw.
        top: how many classes to name.
        out: folder for the pictures.
        json: write classes and probabilities to this file.

    example: spot predict cat.jpg --prior center --tokens 49
    """
    import torch

    import spot
    from spot import report
    from spot.data.images import class_names
    from spot.data.picture import evaluation_transform, open_image
    from spot.errors import InputError
    from spot.evaluation.accuracy import Reader, Setting
    from spot.placement.saliency import resolve_saliency, rgb
    from spot.plots import save
    from spot.plots.prediction import prediction

    if not images:
        raise InputError("name at least one image file")
    if top < 1:
        raise InputError(f"at least one class is to be named, got top={top}")
    pictures = [open_image(path) for path in images]
    loaded = spot.load(model, weights=weights)
    if loaded.num_classes < 1:
        raise InputError(f"{model} has no classifier; fine-tune it first")
    names = class_names(loaded) or [f"class {index}" for index in range(loaded.num_classes)]
    config, transform = loaded.data_config, evaluation_transform(loaded.data_config)
    maps = None if saliency is None else resolve_saliency(saliency, config, transform)
    setting = Setting(loaded.prior if prior is None else prior, tokens, seed)
    reader = Reader(loaded, setting)
    table = []
    for path, picture, name in zip(images, pictures, apart(images), strict=True):
        batch = transform(picture)[None]
        with torch.no_grad():
            positions = reader.place(batch, [path.name], maps)
            probabilities = reader.model(batch, positions)[0].softmax(0) * 100
        best = probabilities.topk(min(top, len(names)))
        rows = [
            {"class": names[index], "probability": value}
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        file = out / f"{name}.png"
        picture_of = rgb(batch, config)[0]
        save(prediction(picture_of, positions[0], loaded.patch_size, rows, title=path.name), file)
        report.show(rows, path.name, digits=1)
        report.console.print(f"The windows are in {file}.", soft_wrap=True)
        table += [
            {"image": str(path), "index": index, **row} for row, index in zip(rows, best.indices.tolist(), strict=True)
        ]
    if json is not None:
        report.save_json(
            json, table, {"model": loaded.name, "prior": setting.label, "tokens": reader.tokens, "seed": seed}
        )


def apart(paths: Sequence[Path]) -> list[str]:
    """A name for each file's picture: its own, with a number where several files have it."""
    names: list[str] = []
    for path in paths:
        name, count = path.stem, 2
        while name in names:
            name, count = f"{path.stem}-{count}", count + 1
        names.append(name)
    return names
