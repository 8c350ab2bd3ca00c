"""Compare an exported file's outputs with its model's, on noise and pictures of several sizes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from spot.data.folders import photo_files
from spot.data.picture import open_image, resize_and_crop
from spot.data.scenes import draw_scenes
from spot.errors import InputError
from spot.evaluation.accuracy import features_and_head
from spot.export.graph import ExportedModel, normalise_pixels
from spot.export.runtime import Exported
from spot.models.spot_vit import SpotViT

TOLERANCE = 1e-4  # relative to the largest value of an output

Run = Callable[[Tensor, Tensor | None], Sequence[Tensor]]  # images, positions → outputs


def run_onnx(path: Path) -> Run:
    """A function that runs an ONNX file on tensors."""
    exported = Exported(path, threads=torch.get_num_threads())

    def run(images: Tensor, positions: Tensor | None) -> list[Tensor]:
        results = exported(images.numpy(), None if positions is None else positions.numpy())
        return [torch.from_numpy(results[name]) for name in exported.about["outputs"]]

    return run


def run_torch(path: Path) -> Run:
    """A function that runs a torch.export program."""
    module = torch.export.load(path).module()

    def run(images: Tensor, positions: Tensor | None) -> Sequence[Tensor]:
        with torch.no_grad():
            return module(images) if positions is None else module(images, positions)

    return run


def verify(
    run: Run, model: ExportedModel, about: dict[str, Any], pictures: Sequence[NDArray[np.uint8]]
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest difference and the largest value by output; refuses a file that differs from the model."""
    differences: dict[str, list[Tensor]] = {name: [] for name in about["outputs"]}
    values: dict[str, list[Tensor]] = {name: [] for name in about["outputs"]}
    for images, positions in sample_inputs(about, pictures):
        expected = reference(model, about, images, positions)
        for name, result in zip(about["outputs"], run(images, positions), strict=True):
            if result.shape != expected[name].shape:
                raise InputError(f"the exported {name} have shape {tuple(result.shape)}, the model's another; not kept")
            differences[name].append((result - expected[name]).abs().max())
            values[name].append(expected[name].abs().max())
    # torch's maximum, because Python's loses a NaN.
    difference, largest = (
        {name: torch.stack(each).max().item() for name, each in found.items()} for found in (differences, values)
    )
    for name, value in difference.items():
        if not value <= TOLERANCE * max(1.0, largest[name]):
            raise InputError(f"the exported {name} differ from the model's by {value:.2g}; the file was not kept")
    return difference, largest


def sample_inputs(about: dict[str, Any], pictures: Sequence[NDArray[np.uint8]]) -> list[tuple[Tensor, Tensor | None]]:
    """Test inputs: fewest and most tokens, one and several images, another image size."""
    height, width = about["img_size"]
    low, high = about["token_range"]
    other = width if about["fixed_size"] else width + 9
    shapes = (1, (height, width), high), (3, (height, width), low), (2, (height, other), 17)
    batches = [(random_images(about, batch, size), tokens) for batch, size, tokens in shapes]
    for picture in pictures:
        pixels = torch.from_numpy(picture.copy())[None]
        images = pixels if about["image"] == "uint8" else normalise_pixels(pixels, about["preprocessing"])
        batches.append((images, 49))
    if about["built_in"]:
        return [(images, None) for images, _ in batches]
    generator = torch.Generator().manual_seed(1)
    return [(images, random_positions(about, len(images), tokens, generator)) for images, tokens in batches]


def sample_pictures(model: SpotViT, folder: Path | None = None, count: int = 8) -> list[NDArray[np.uint8]]:
    """Pictures (H, W, 3) preprocessed up to normalisation, from a folder or the built-in scenes."""
    if model.data_config["input_size"][0] != 3:
        return []
    if folder is None:
        scenes = draw_scenes(range(count)).images.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
        images = [Image.fromarray(scene) for scene in scenes]
    else:
        files = photo_files([folder])
        images = [open_image(path) for path in files[:: max(1, len(files) // count)][:count]]
    return [np.asarray(resize_and_crop(image, model.img_size)) for image in images]


def random_images(about: dict[str, Any], batch: int, size: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if about["image"] == "uint8":
        return torch.randint(256, (batch, *size, 3), generator=generator, dtype=torch.uint8)
    return torch.randn(batch, about["channels"], *size, generator=generator)


@torch.no_grad()
def reference(
    model: ExportedModel, about: dict[str, Any], images: Tensor, positions: Tensor | None
) -> dict[str, Tensor]:
    """The model's own outputs, by name; without positions, at its own placement."""
    if about["image"] == "uint8":
        images = normalise_pixels(images, about["preprocessing"])
    tokens, head = features_and_head(model, images, positions)
    return {"tokens": tokens, "pooled": head(tokens, pre_logits=True), "logits": head(tokens)}


def random_positions(about: dict[str, Any], batch: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Random positions, with scales if the file takes them; some are beyond the edges, where the border is repeated."""
    columns = 7 if about["regions"] else 3 if about["sizes"] else 2
    positions = 1.2 * torch.rand(batch, tokens, columns, generator=generator) - 0.1
    if about["sizes"]:
        largest = min(about["largest_scale"], max(about["img_size"]) / about["patch_size"])
        positions[..., 2] = 0.5 * (2 * largest) ** positions[..., 2].clamp(0, 1)
    if about["regions"]:
        positions[..., 5:] = positions[..., 5:].abs() + 0.3
    return positions
