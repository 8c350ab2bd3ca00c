"""Predictions for photographs of any size, and their figures.

`fit` selects the transform of a photograph (`spot.data.picture.evaluation_transform`). "whole" keeps its shape, because
positions are fractions and tokens need no grid. For searches on photographs see evaluation/searches.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from spot import report
from spot.data.classes import class_names
from spot.data.picture import Fit, evaluation_transform, open_photos
from spot.errors import InputError
from spot.models.cascade import Cascade
from spot.models.family import Family, Source, at_budget
from spot.models.glimpsed import Glimpsed
from spot.models.spot_vit import SpotViT
from spot.models.tome import Merging
from spot.models.wrappers import TokenModel
from spot.placement.priors import AnyPrior
from spot.placement.saliency import maps_for, rgb
from spot.placement.sizes import Scale
from spot.plots.placements import windows_figure


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one photograph."""

    path: Path
    image: Tensor  # (3, H, W) in [0, 1], the model's input
    positions: Tensor  # (N, 2)
    map: Tensor | None  # (H, W), the prior's saliency map
    rows: list[dict[str, Any]]  # "index", "class" and "probability" (in percent) of the most probable classes

    def figure(self, window: int) -> Figure:
        """Draw the photograph, its windows, the saliency map and the predicted classes."""
        title = report.printable(self.path.name)
        return windows_figure(self.image, self.positions, window, self.rows, saliency=self.map, title=title)


@torch.no_grad()
def predict(
    source: Source,
    paths: Sequence[Path],
    *,
    prior: AnyPrior | None = None,
    tokens: int | None = None,
    scale: Scale | None = None,
    saliency: str | None = None,
    seed: int = 0,
    cascade: Cascade | None = None,
    until: float | None = None,
    merge: bool = False,
    glimpses: int | None = None,
    top: int = 5,
    fit: Fit | None = None,
    skip: bool = False,
) -> Iterator[Prediction]:
    """Predict the classes of photographs.

    Args:
        source: a model, or a family, which has weights for each budget.
        prior, tokens, scale: the placement, number and size of windows; by default the model's.
        saliency: source of saliency maps, for priors that need them; see `spot.placement.saliency.maps_for`.
        seed: seed of random priors, combined with each file's name.
        cascade: predict with early exit instead of one budget.
        until: the confidence at which the cascade stops, instead of its thresholds.
        merge: place more tokens and merge them in later blocks, at the cost of `tokens`; see spot.models.tome.Merging.
        glimpses: number of places to classify, for a model with a finder; see spot.models.glimpsed.
        top: number of classes to return.
        fit: see `spot.data.picture.evaluation_transform`; by default the model's.
        skip: skip unreadable files with a warning.
    """
    if top < 1:
        raise InputError(f"top must be at least 1 class, got {top}")
    if cascade is not None and not (prior is tokens is saliency is scale is None and fit != "whole" and not merge):
        raise InputError("a cascade sets the placement; leave out prior, tokens, scale, saliency, merge, fit='whole'")
    if until is not None and cascade is None:
        raise InputError("until needs a cascade, whose confidence is calibrated; make one with spot calibrate")
    model: SpotViT = at_budget(source, tokens, prior=prior, scale=scale)
    names = names_of(model)
    fit = fit or model.fit
    reader: TokenModel = Merging(source, model.tokens, prior) if merge else model
    if glimpses is not None or (model.fit == fit == "full" and prior is tokens is None and not merge):
        reader = Glimpsed(model, glimpses)
    for (path,), images, maps in photo_batches(model, paths, prior, saliency, fit, skip=skip):
        if fit == "whole" and isinstance(source, Family) and not merge:  # the weights depend on the image's shape
            size = (images.shape[2], images.shape[3])
            reader = at_budget(source, model.tokens, prior=prior, scale=scale, image_size=size).to(images.device)
        if cascade is None:
            positions = reader.place(images, keys=[path.name], maps=maps, seed=seed)
            logits = reader(images, positions)
        else:
            *_, step = cascade(images, until)
            positions, logits = step.positions, step.logits
        best = (logits[0].softmax(0) * 100).topk(min(top, len(names)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows = [{"index": index, "class": names[index], "probability": value} for index, value in pairs]
        image, map_ = rgb(images, model.data_config)[0].cpu(), None if maps is None else maps[0].cpu()
        yield Prediction(path, image, positions[0].cpu(), map_, rows)


def photo_batches(
    model: SpotViT,
    paths: Sequence[Path],
    prior: AnyPrior | None,
    saliency: str | None,
    fit: Fit,
    *,
    skip: bool,
    batch_size: int = 1,
    title: str = "",
) -> Iterator[tuple[list[Path], Tensor, Tensor | None]]:
    """Open photographs: paths, images (B, C, H, W) as the model's input, and the maps (B, H, W) that the prior needs.

    Photographs that keep their shape come one by one. With a title there is a progress bar.
    """
    transform = evaluation_transform(model.data_config, fit=fit)
    source = maps_for(model, [prior or model.prior], saliency, transform=transform)
    device = next(model.parameters()).device
    photographs = report.track(open_photos(paths, transform, skip=skip), title, len(paths), shown=bool(title))
    while batch := list(islice(photographs, batch_size if fit in ("crop", "squash") else 1)):
        opened, images = [path for path, _ in batch], torch.stack([image for _, image in batch]).to(device)
        yield opened, images, None if source is None else source(images, [path.name for path in opened])


def picture_files(paths: Sequence[Path], out: Path) -> dict[Path, Path]:
    """The output path of each image's figure. Images of the same name get different paths."""
    if len(paths) == 1 and out.suffix:
        return {paths[0]: out}
    files: dict[Path, Path] = {}
    for path in paths:
        file, number = out / f"{path.stem}.png", 2
        while file in files.values():
            file, number = out / f"{path.stem}-{number}.png", number + 1
        files[path] = file
    return files


def names_of(model: SpotViT) -> list[str]:
    """The names of a classifier's classes, or "class 0" and so on."""
    if model.num_classes < 1:
        raise InputError(f"{model.name} has no classifier; fine-tune it first")
    return class_names(model) or [f"class {index}" for index in range(model.num_classes)]


def short(name: str) -> str:
    """The first of a class's synonyms."""
    return name.split(",")[0]
