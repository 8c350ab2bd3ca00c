"""Write a model as one file, ONNX or a torch.export program (.pt2), and verify it before it gets its name.

The file contains normalisation, class names and preprocessing, so that its users cannot get them wrong.
`export` compares the file with the model on noise and pictures, in several batch sizes, image sizes and
numbers of tokens, and reports the largest difference. A file that differs is deleted.
"""

import copy
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spot import __version__
from spot.data.classes import class_names
from spot.data.picture import CROP_RATIO
from spot.errors import InputError
from spot.export.graph import ExportedModel, Graph, Input, Output, blank
from spot.export.runtime import EXTRA, KEY, STAGES
from spot.export.verify import random_images, random_positions, run_onnx, run_torch, verify
from spot.hashes import hash_model
from spot.models.cascade import Cascade
from spot.models.spot_vit import SpotViT
from spot.placement.priors import resolve_prior
from spot.store import atomic_write, write_json

Target = Literal["onnx", "torch"]
SUFFIXES: dict[Target, str] = {"onnx": ".onnx", "torch": ".pt2"}
MIN_TOKENS, MAX_TOKENS = 2, 256  # the maximum is larger for a model with a larger grid
MAX_SIDE = 4096  # of an image, in pixels
MAX_BATCH = 1024
ATTENTION_OPSET = 23
MAX_BYTES = 2 * 2**30  # of a single ONNX file


@dataclass(frozen=True)
class Written:
    """An exported file with its largest difference from the model, and the largest value, by output."""

    path: Path
    about: dict[str, Any]
    difference: dict[str, float]
    largest: dict[str, float]

    @property
    def summary(self) -> str:
        """A short summary for display."""
        size = self.path.stat().st_size / 1e6
        differences = ", ".join(
            f"{name} by at most {value:.1e} (of values up to {self.largest[name]:.1f})"
            for name, value in self.difference.items()
        )
        return f"{self.path} ({size:.1f} MB) differs from the model in {differences}."


def export(
    model: ExportedModel,
    path: str | Path,
    *,
    to: Target = "onnx",
    image: Input = "uint8",
    built_in: bool = False,
    sizes: bool = False,
    regions: bool = False,
    outputs: Sequence[Output] = ("logits",),
    opset: int = ATTENTION_OPSET,
    pictures: Sequence[NDArray[np.uint8]] = (),
) -> Written:
    """Write a model to a file that runs without SPoT, and verify it.

    Args:
        model: a SpotViT, a PlainViT, or a ToMe such as Merging. The placement and merges of the last two are built in.
        to: onnx, or torch for a torch.export program.
        image: "uint8" for RGB (B, H, W, 3), "float" for normalised images (B, C, H, W); H and W are free
            unless a placement is built in.
        built_in: build the model's own placement in, with its number of tokens and scale; `model.at` chooses them.
            Otherwise the file takes positions (B, N, 2) as a second input.
        sizes: positions are (B, N, 3), with each window's scale; implied if the model's scale is not 1.
        regions: positions are (B, N, 7), with each window's scale and region.
        outputs: a selection of logits, pooled and tokens.
        opset: of the ONNX file; below 23 attention is decomposed, for older runtimes.
        pictures: (H, W, 3) for verification in addition to noise, already resized and cropped.
    """
    path = Path(path)
    check_export(model.spot_vit, path, to, outputs)
    model = copy.deepcopy(model).cpu().float().eval()
    columns = 7 if regions else 3 if sizes or model.spot_vit.scale not in (None, 1) else 2
    attention_node = to == "onnx" and opset >= ATTENTION_OPSET
    graph = Graph(
        model, image=image, built_in=built_in, columns=columns, outputs=outputs, attention_node=attention_node
    ).eval()
    about = describe_export(model.spot_vit, graph)
    with atomic_write(path) as temporary:
        if to == "onnx":
            write_onnx(graph, about, temporary, opset)
            run = run_onnx(temporary)
        else:
            write_torch(graph, about, temporary)
            run = run_torch(temporary)
        difference, largest = verify(run, model, about, pictures)
    return Written(path, about, difference, largest)


def export_cascade(cascade: Cascade, folder: str | Path, **options: Any) -> list[Written]:
    """Write a cascade as a folder for ExportedCascade: an ONNX file per stage, and thresholds and weights as JSON.

    options: image, opset and pictures, as in `export`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written, stages = [], []
    models: list[Any] = list(cascade.models)
    for number, (stage, model) in enumerate(zip(cascade.stages, models, strict=True)):
        name, last = f"stage-{number + 1}.onnx", number + 1 == len(cascade.stages)
        written.append(export(model, folder / name, built_in=True, **options))
        threshold = 0.0 if last else stage.threshold
        stages.append({**asdict(stage), "threshold": threshold, "file": name})
    write_json(folder / STAGES, {"model": cascade.name, "hash": cascade.hash, "stages": stages})
    return written


def check_export(model: SpotViT, path: Path, to: Target, outputs: Sequence[Output]) -> None:
    """Refuse models and options that cannot be exported, or a missing package, before any work is done."""
    if path.suffix != SUFFIXES[to]:
        raise InputError(f"a file for {to} ends in {SUFFIXES[to]}, got {path}")
    if not outputs:
        raise InputError("at least one output is needed: logits, pooled or tokens")
    if "logits" in outputs and model.num_classes < 1:
        raise InputError(f"{model.name} has no classifier, and so no logits; ask for pooled or tokens instead")
    if to == "torch":
        return
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError as error:
            raise InputError(f"exporting to ONNX needs {name}; {EXTRA}") from error
    size = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    if size > 0.95 * MAX_BYTES:
        raise InputError(f"{model.name} has {size / 2**30:.1f} GiB of weights, an ONNX file at most 2; use --to torch")


def describe_export(model: SpotViT, graph: Graph) -> dict[str, Any]:
    """The file's description of itself, as JSON values."""
    config = model.data_config
    names = class_names(model) or [f"class {index}" for index in range(model.num_classes)]
    prior, positions = resolve_prior(model.prior), None
    if graph.on_grid:
        positions = model.grid().tolist()
    elif not (prior.random or prior.uses_image):
        positions = model.place(blank(model))[0].tolist()
    return {
        "format": 1,
        "version": __version__,
        "model": model.name,
        "model_hash": hash_model(model),
        "image": graph.image,
        "channels": config["input_size"][0],
        "outputs": list(graph.outputs),
        "prior": prior.name,
        "built_in": graph.built_in,
        "learned": graph.built_in and positions is None,  # positions depend on the image
        "fixed_size": graph.built_in,  # images must have the model's own size
        "merged": graph.schedule if graph.merging else None,  # number of tokens that each block merges away
        "positions": positions,
        "sizes": graph.columns > 2,
        "regions": graph.columns == 7,
        "largest_scale": 2 ** (graph.levels - 1),
        "token_range": [MIN_TOKENS, max(MAX_TOKENS, len(model.grid()))],
        "img_size": list(model.img_size),
        "patch_size": model.patch_size,
        "preprocessing": {
            "size": list(model.img_size),
            "interpolation": "bicubic",
            "crop": "center",
            "crop_ratio": CROP_RATIO,
            "mean": list(config["mean"]),
            "std": list(config["std"]),
            "color": "RGB",
        },
        "classes": names if model.num_classes else [],
    }


# Writing


def example(about: dict[str, Any]) -> tuple[Tensor, ...]:
    """Inputs for tracing. Sizes of free dimensions differ from each other and from 0 and 1."""
    sides = [side + 2 * number + 2 for number, side in enumerate(about["img_size"])]
    images = random_images(about, 2, about["img_size"] if about["built_in"] else sides)
    if about["built_in"]:
        return (images,)
    return images, random_positions(about, 2, 5, torch.Generator().manual_seed(0))


def free_dimensions(about: dict[str, Any]) -> tuple[dict[int, Any], ...]:
    """The free dimensions of the inputs, with their bounds."""
    dim = torch.export.Dim
    batch = dim("batch", min=1, max=MAX_BATCH)
    rows = 1 if about["image"] == "uint8" else 2
    sides = {rows: dim("height", min=about["patch_size"], max=MAX_SIDE)}
    sides[rows + 1] = dim("width", min=about["patch_size"], max=MAX_SIDE)
    if about["built_in"]:
        return ({0: batch},)
    low, high = about["token_range"]
    return {0: batch, **sides}, {0: batch, 1: dim("tokens", min=low, max=high)}


def write_onnx(graph: Graph, about: dict[str, Any], path: Path, opset: int) -> None:
    """Trace a graph and write it as ONNX, with `about` in its metadata."""
    import onnx

    inputs = example(about)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            graph,
            inputs,
            dynamo=True,
            opset_version=opset,
            input_names=["images", "positions"][: len(inputs)],
            output_names=about["outputs"],
            dynamic_shapes=free_dimensions(about),
            verbose=False,
        )
    file = program.model_proto
    written = next(each.version for each in file.opset_import if not each.domain)
    if written != opset:  # torch only logs this
        raise InputError(f"this model cannot be written in opset {opset}; use opset {written} or a later one")
    file.producer_name, file.producer_version = "spot-vit", __version__
    del file.metadata_props[:]
    onnx.helper.set_model_props(file, {KEY: json.dumps(about)})
    for node in file.graph.node:  # source locations of nodes: a third of the file's text
        del node.metadata_props[:]
        node.doc_string = ""
    onnx.save_model(file, str(path))


def write_torch(graph: Graph, about: dict[str, Any], path: Path) -> None:
    """Trace a graph and write it as a torch.export program, with `about` as an extra file."""
    with torch.no_grad():
        program = torch.export.export(graph, example(about), dynamic_shapes=free_dimensions(about))
    torch.export.save(program, path, extra_files={f"{KEY}.json": json.dumps(about)})
