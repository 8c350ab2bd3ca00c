"""What a model says of photographs, and where tokens would have to be for it to say more.

`predict` and `search_photos` take files of any size; each yields a record for every photograph, with
what is needed to draw it (`prediction_figure`, `search_figure`). `fit` says how a photograph becomes
what the model sees, see `spot.data.picture.photo_transform`; "whole" leaves it its own shape, because
positions are fractions and tokens need no grid.
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
from spot.data.classes import class_folders, class_names
from spot.data.images import Transform
from spot.data.picture import Fit, open_image, photo_transform
from spot.errors import InputError, unknown
from spot.models.merging import Merging
from spot.models.spot_vit import SpotViT
from spot.placement.dataset_search import obfuscated
from spot.placement.oracle import PRESETS, SearchSettings, search
from spot.placement.saliency import maps_for, rgb
from spot.plots.placements import placement_figure, prediction


@dataclass(frozen=True)
class Prediction:
    """What a model says of one photograph."""

    path: Path
    image: Tensor  # (3, H, W) in [0, 1], as the model saw it
    positions: Tensor  # (N, 2)
    map: Tensor | None  # (H, W), what the prior drew from
    rows: list[dict[str, Any]]  # "index", "class" and "probability" in percent of the most probable classes


@dataclass(frozen=True)
class PhotoSearch:
    """The search on one photograph: the class it is about, and the step that counts."""

    path: Path
    image: Tensor  # (3, H, W) in [0, 1], as the model saw it
    trajectory: Tensor  # (steps + 1, N, 2), up to the step that counts
    name: str  # of the class: the label, or what the model says of the whole image
    before: float  # its probability at the start
    after: float  # and at the end
    predictions: tuple[str, str]  # what the model says at the start and at the end
    reached: bool  # whether that class is the most probable one at the end

    @classmethod
    def of(
        cls, path: Path, image: Tensor, trajectory: Tensor, logits: Tensor, goal: int | None, names: Sequence[str]
    ) -> "PhotoSearch":
        """logits (2, classes) at the start and the end; without a goal it is about what the model says at the end."""
        start, end = logits.argmax(-1).tolist()
        goal = end if goal is None else goal
        before, after = logits.softmax(-1)[:, goal].tolist()
        said = (short(names[start]), short(names[end]))
        return cls(path, image, trajectory, short(names[goal]), before, after, said, end == goal)


def opened(paths: Sequence[Path], transform: Transform, *, skip: bool) -> Iterator[tuple[Path, Tensor]]:
    """Photographs (3, H, W) as a model sees them; one that cannot be read stops, or is named and left out."""
    count = 0
    for path in paths:
        try:
            image = transform(open_image(path))
        except InputError as error:
            if not skip:
                hint = "; pass unreadable='skip' to go on without it" if len(paths) > 1 else ""
                raise InputError(f"{error}{hint}") from None
            report.warn(f"skipped: {error}")
        else:
            count += 1
            yield path, image
    if not count:
        raise InputError("none of the files is an image that can be read")


@torch.no_grad()
def predict(
    model: SpotViT,
    paths: Sequence[Path],
    *,
    prior: str | None = None,
    tokens: int | None = None,
    saliency: str | None = None,
    seed: int = 0,
    until: float | None = None,
    merge: bool = False,
    top: int = 5,
    fit: Fit = "crop",
    skip: bool = False,
) -> Iterator[Prediction]:
    """What a classifier says of photographs.

    Args:
        prior, tokens: where and how many; by default the model's own.
        saliency: for priors that need a map, see `spot.placement.saliency.maps_for`.
        seed: of priors that draw, together with each file's name.
        until: few tokens first, and more until the model is so sure (from 0 to 1); see spot.models.anytime.
        merge: more tokens, merged in later blocks at the cost of as many as were asked for; see spot.models.merging.
        top: how many classes to name.
        skip: leave out what cannot be read, with a warning.
    """
    if top < 1:
        raise InputError(f"at least one class is to be named, got top={top}")
    if until is not None and not (prior is tokens is saliency is None and fit != "whole" and not merge):
        raise InputError("with until the calibration says where tokens go and how many, on images of the model's size")
    names = names_of(model)
    placing: Any = {"seed": seed} if merge else {"seed": seed, "tokens": tokens, "prior": prior}
    reader = Merging(model, model.tokens if tokens is None else tokens, prior) if merge else model
    transform = photo_transform(model.data_config, fit)
    maps = maps_for(model, [prior or model.prior], saliency, transform=transform)
    device = next(model.parameters()).device
    for path, image in opened(paths, transform, skip=skip):
        images, keys = image[None].to(device), [path.name]
        map_ = None if maps is None else maps(images, keys)
        if until is None:
            positions = reader.place(images, keys=keys, maps=map_, **placing)
            logits = reader(images, positions)
        else:
            *_, step = model.look(images, until)
            positions, logits = step.positions, step.logits
        best = (logits[0].softmax(0) * 100).topk(min(top, len(names)))
        each = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows = [{"index": index, "class": names[index], "probability": value} for index, value in each]
        seen, drawn_from = rgb(images, model.data_config)[0].cpu(), None if map_ is None else map_[0].cpu()
        yield Prediction(path, seen, positions[0].cpu(), drawn_from, rows)


def search_photos(
    model: SpotViT,
    paths: Sequence[Path],
    labels: Sequence[str] = (),
    settings: SearchSettings = PRESETS["agree"],
    *,
    prior: str | None = None,
    saliency: str | None = None,
    seed: int = 0,
    batch_size: int = 32,
    fit: Fit = "crop",
    skip: bool = False,
) -> Iterator[PhotoSearch]:
    """Move tokens on photographs; `settings` are those of `spot.search`, `labels` as for `class_numbers`.

    The last step counts, but for "agree" the one that agreed best: where few tokens say what all say
    from the start, more steps only lead away.
    """
    names, objective = names_of(model), settings.objective
    transform = photo_transform(model.data_config, fit)
    maps = maps_for(model, [prior or model.prior], saliency, transform=transform)
    device = next(model.parameters()).device
    numbers = dict(zip(paths, class_numbers(labels, len(paths), model), strict=True)) if labels else {}
    photographs = report.track(opened(paths, transform, skip=skip), "searching", len(paths))
    size = 1 if fit == "whole" else batch_size  # whole images differ in shape
    while some := list(islice(photographs, size)):
        keys = [path.name for path, _ in some]
        images = torch.stack([image for _, image in some]).to(device)
        classes = torch.tensor([numbers[path] for path, _ in some], device=device) if numbers else None
        if objective == "obfuscate" and classes is not None:
            classes = obfuscated(classes, keys, model.num_classes, seed)
        goal = "descent" if objective == "obfuscate" else objective
        seen = None if maps is None else maps(images, keys)
        start = model.place(images, prior=prior, keys=keys, seed=seed, maps=seen)
        result = search(model, images, classes, start, settings.changed(objective=goal))
        target = result.target if result.target is None or result.target.ndim == 1 else result.target.argmax(1)
        for index, (path, _) in enumerate(some):
            step = int(result.best_step[index]) if objective == "agree" else result.logits.shape[1] - 1
            about, image = None if target is None else int(target[index]), rgb(images[index], model.data_config).cpu()
            trajectory = result.trajectory[index, : step + 1].cpu()
            yield PhotoSearch.of(path, image, trajectory, result.logits[index, [0, step]], about, names)


def prediction_figure(made: Prediction, window: int) -> Figure:
    """The photograph, its windows, the map they were drawn from, and the classes."""
    title = report.printable(made.path.name)
    return prediction(made.image, made.positions, window, made.rows, saliency=made.map, title=title)


def search_figure(made: PhotoSearch, window: int, *, adversarial: bool = False) -> Figure:
    """The windows at the start and at the end, and the way between."""
    start, end = f"start: {made.name} {made.before:.1%}", f"end: {made.name} {made.after:.1%}"
    title = report.printable(made.path.name)
    return placement_figure(
        made.image, made.trajectory, window, start=start, end=end, title=title, adversarial=adversarial
    )


def picture_files(paths: Sequence[Path], out: Path) -> list[Path]:
    """Where each image's picture goes; images of one name do not overwrite each other."""
    if len(paths) == 1 and out.suffix:
        return [out]
    files: list[Path] = []
    for path in paths:
        file, again = out / f"{path.stem}.png", 2
        while file in files:
            file, again = out / f"{path.stem}-{again}.png", again + 1
        files.append(file)
    return files


def names_of(model: SpotViT) -> list[str]:
    """What a classifier calls its classes, or "class 0" and so on."""
    if model.num_classes < 1:
        raise InputError(f"{model.name} has no classifier; fine-tune it first")
    return class_names(model) or [f"class {index}" for index in range(model.num_classes)]


def short(name: str) -> str:
    """The first of a class's synonyms."""
    return name.split(",")[0]


def class_numbers(labels: Sequence[str], count: int, model: SpotViT) -> list[int]:
    """Class indices of labels given by number, name, one of a name's synonyms, or folder name (wnid)."""
    if len(labels) not in (1, count):
        raise InputError(f"one label for all images or one each is needed, got {len(labels)} for {count} images")
    known: dict[str, int] = {}
    for index, name in enumerate(class_names(model) or []):
        for synonym in (name, *name.split(",")):
            known.setdefault(synonym.strip().lower(), index)
    folders = class_folders(model)
    known |= {} if isinstance(folders, int) else {name.lower(): index for index, name in enumerate(folders)}
    numbers = []
    for label in labels:
        if label.isdecimal() and int(label) < model.num_classes:
            numbers.append(int(label))
        elif label.isdecimal():
            raise InputError(f"labels must be between 0 and {model.num_classes - 1}, the model's classes, got {label}")
        elif label.lower() in known:
            numbers.append(known[label.lower()])
        else:
            raise unknown("class", label, known, hint="a class index will do too")
    return numbers * count if len(numbers) == 1 else numbers
