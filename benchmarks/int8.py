"""Eight bits: top-1 of an exported ViT-Ti in float and in int8, and how often both say the same class.

The retrofitted ViT-Ti is written twice, as files that take positions and have the weights for 49 tokens; the int8 one
is calibrated on 64 training images. Both are run on the first image of every second validation class. Needs ../shared.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spot
from spot import report
from spot.data.images import Images, data_for
from spot.data.picture import open_image
from spot.export.files import export
from spot.export.runtime import Exported
from spot.export.verify import sample_pictures

SHARED = Path(__file__).parents[2] / "shared" / "data"
NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
BUDGETS = (25, 49, 100, 196)


def run() -> list[dict[str, Any]]:
    if not SHARED.is_dir():
        return []
    model = spot.load(f"{NAME}+spot", weights=SHARED / "weights" / f"{NAME}.safetensors")
    images = data_for(model, SHARED / "imagenet-val-2k")
    assert isinstance(images, Images)
    first: dict[int, int] = {}  # of each class
    for index, number in enumerate(images.order):
        first.setdefault(int(images.source[number][1]), index)
    images.keep([first[label] for label in sorted(first)[::2]])
    with tempfile.TemporaryDirectory() as folder:
        whole, eight = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        pictures = sample_pictures(model, SHARED / "imagenet-train-5k", 128)
        export(model, whole, pictures=pictures[:2])
        export(model, eight, pictures=pictures[1::2], int8=pictures[::2])
        said = {name: answers(Exported(path, threads=1), model, images) for name, path in
                (("float", whole), ("int8", eight))}  # fmt: skip
        sizes = {"float": whole.stat().st_size, "int8": eight.stat().st_size}
    labels = np.array([images.source[number][1] for number in images.order])
    rows: list[dict[str, Any]] = [
        {"file": name, "megabytes": sizes[name] / 1e6, **per_budget(100 * (each == labels).mean(1))}
        for name, each in said.items()
    ]
    return [*rows, {"file": "the same class", **per_budget(100 * (said["float"] == said["int8"]).mean(1))}]


def per_budget(values: Any) -> dict[str, float]:
    return {f"{tokens} tokens": float(value) for tokens, value in zip(BUDGETS, values, strict=True)}


def answers(exported: Exported, model: spot.SpotViT, images: Images) -> Any:
    """What a file says of every image with every budget: (budgets, images)."""
    blank = torch.zeros(1, 3, *model.img_size)
    places = [model.place(blank, tokens=tokens).numpy() for tokens in BUDGETS]
    said = []
    for index in report.track(range(len(images)), "running", len(images)):
        pixels = exported.prepare(open_image(images.source[images.order[index]][0]))[None]
        said.append([exported(pixels, positions)["logits"].argmax() for positions in places])
    return np.array(said).T
