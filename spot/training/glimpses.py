"""Fine-tune a model to classify large pictures from glimpses.

Glimpses are cropped with the tokenizer's own sampling. So a training step costs as much as one on small images, and
the weights apply unchanged to glimpses of the whole picture (spot/placement/glimpses.py). First a linear head is fitted
on frozen features of a few random glimpses per picture. Then all weights are trained, earlier blocks at lower rates.

Glimpses of the class `none` are random squares and false positives of the finder. They are taken from pictures of this
class, and now and then from other pictures, away from their places.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spot import report
from spot.data.folders import read_keys
from spot.data.large_pictures import LargePictures, boxes_to_places, read_boxes
from spot.draws import Draw, seeded
from spot.errors import InputError
from spot.models.family import Source, at_budget
from spot.models.spot_vit import SpotViT
from spot.options import GlimpseOptions
from spot.placement.finder import MARGIN, Finder
from spot.placement.policy import read_policy_file
from spot.training.discovery import BATCH, discover_places, fit_head, pooled_features
from spot.training.finder import (
    NO_PLACES,
    Places,
    detect,
    distances,
    false_positives,
    glimpse_of,
    train_finder,
    train_second_stage,
)
from spot.training.new_weights import with_classifier
from spot.training.optim import build_optimizer, training_steps
from spot.training.recipes import find_recipe, override
from spot.training.run_folder import RunFolder

ELSEWHERE = 0.2  # share of the glimpses of pictures with places that are away from them, with the class none


class Glimpses:
    """Random glimpses of pictures, with their labels.

    Args:
        places: by key, (n, 4): y, x and size in pixels, and weight.
        none: index of the class of pictures without an object, or None if every picture has one.
        samples: S, the side of a glimpse in samples.
        mistaken: false positives of a finder, by key.
    """

    def __init__(
        self,
        pictures: LargePictures,
        places: Places,
        *,
        none: int | None,
        samples: int,
        mistaken: Places | None = None,
        seed: int = 0,
    ) -> None:
        self.pictures, self.places, self.mistaken = pictures, places, mistaken or {}
        self.none, self.samples, self.seed = none, samples, seed
        logs = torch.cat([each[:, 2] for each in places.values()]).log()
        self.log_size = (float(logs.mean()), float(logs.std()) if len(logs) > 1 else 0.3)  # mean and deviation

    def batch(self, rows: Sequence[int], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Normalised glimpses (B, 3, S, S), from −1 to 1, and labels (B,)."""
        views, labels = [], []
        for row in rows:
            square, label = self.square(row, draw)
            views.append(color_jitter(glimpse_of(self.pictures.pixels(row), *square, self.samples) / 255, draw))
            labels.append(label)
        return torch.stack(views) * 2 - 1, torch.tensor(labels)

    def square(self, row: int, draw: np.random.Generator) -> tuple[tuple[float, float, float], int]:
        """A glimpse (y, x, side) in pixels, with a small random shift and resizing, and its label."""
        key, label = self.pictures.keys[row], self.pictures.labels[row]
        places = self.places.get(key, NO_PLACES)
        height, width = self.pictures.pixels(row).shape[1:]
        if len(places) and not (self.none is not None and draw.random() < ELSEWHERE):
            share = places[:, 3].numpy().astype(float)
            place = places[draw.choice(len(places), p=share / share.sum())]
        else:
            label = label if self.none is None else self.none
            wrong = self.mistaken.get(key, NO_PLACES)
            if len(wrong) and draw.random() < 0.7:
                place = wrong[draw.integers(len(wrong))]
            else:
                for _ in range(20):  # away from the places
                    size = math.exp(draw.normal(*self.log_size))
                    place = torch.tensor([draw.uniform(0, height), draw.uniform(0, width), size])
                    if (distances(place[None], places) > places[:, 2] + size).all():
                        break
        y, x, size = place[:3].tolist()
        side = min(MARGIN * size * math.exp(draw.normal(0, 0.18)), float(min(height, width)))
        y, x = (middle + draw.normal(0, 0.09) * side for middle in (y, x))
        return (y, x, side), label


def color_jitter(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Change brightness, contrast and saturation of pixels (3, H, W) from 0 to 1 at random."""
    pixels = pixels * draw.uniform(0.6, 1.5) + draw.uniform(-0.12, 0.12)
    grey = pixels.mean(0, keepdim=True)
    return grey + (pixels - grey) * draw.uniform(0.6, 1.4)


def train_classifier(
    model: SpotViT,
    glimpses: Glimpses,
    *,
    epochs: int = 8,
    state: Path | None = None,
) -> SpotViT:
    """Fit the head of a model on glimpses, then fine-tune all weights; changes and returns the model.

    state: a file from which an interrupted run resumes, removed at the end.
    """
    draw, count = np.random.default_rng(glimpses.seed), len(glimpses.pictures)
    steps, order = epochs * max(1, count // BATCH), list[int]()
    optimizer = build_optimizer(model, override(find_recipe("finetune-small"), {"lr": 1e-4}))
    if state is None or not state.is_file():
        rows = [int(row) for _ in range(3) for row in draw.permutation(count)]
        pooled = []
        for begin in report.track(range(0, len(rows), BATCH), "features"):
            images, labels = glimpses.batch(rows[begin : begin + BATCH], draw)
            pooled.append((pooled_features(model.eval(), images), labels))
        features, known = (torch.cat(column) for column in zip(*pooled, strict=True))
        fit_head(model, features, known)
    for _ in training_steps(steps, model, optimizer, "fine-tuning", clip=1.0, file=state):
        if len(order) < BATCH:
            order = [int(row) for row in draw.permutation(count)]
        rows, order = order[:BATCH], order[BATCH:]
        images, labels = glimpses.batch(rows, draw)
        logits = model.train()(images, model.grid(images))
        F.cross_entropy(logits, labels, label_smoothing=0.05).backward()
    return model.eval()


def learn_to_find(
    source: Source,
    data: str | Path,
    out: str | Path,
    options: GlimpseOptions | None = None,
    *,
    boxes: str | Path | None = None,
    split: str = "train",
    leave_out: Path | None = None,
) -> SpotViT:
    """Train a model to find and classify glimpses of large pictures, and write it to the folder `out`.

    The result of every stage is kept in `out`, so the same command resumes an interrupted run.

    Args:
        source: a model or family, such as spot.load("vit-ti").
        data: a folder with one sub-folder per class, perhaps below train and val.
        boxes: a CSV file with the columns file, left, top, right, bottom. Default: places are learned from labels.
        leave_out: a file that names pictures to exclude, one per line.
    """
    out, options = Path(out), options or GlimpseOptions()
    pictures = LargePictures.open(data, split)
    if leave_out is not None:
        pictures = pictures.part(set(pictures.keys) - set(read_keys(leave_out)))
    none = pictures.classes.index(options.none) if options.none in pictures.classes else None
    settings = {**asdict(options), "pictures": len(pictures), "boxes": boxes is not None, "classes": pictures.classes}
    if boxes is None and none is None:
        advice = f"--glimpses.none {options.none}"
        raise InputError(f"without boxes one class must have pictures without an object ({advice})")
    folder = RunFolder(out, settings)
    seed = options.seed
    with folder.held(), seeded(seed, Draw.WEIGHTS):
        model = with_classifier(at_budget(source, options.tokens), len(pictures.classes), None, seed, anew=True)
        model.class_names = list(pictures.classes)
        finder = Finder(model.patch_size, longest=options.longest, about={"model": model.name, "made": folder.settings})
        for key, picture in pictures.items():
            try:
                finder.refuse(picture[None])
            except InputError as error:
                raise InputError(f"{key}: {error}") from None
        if boxes is not None:
            places = boxes_to_places(read_boxes(boxes, pictures))
        else:
            assert none is not None  # checked above
            places = discover_places(model.eval(), source, pictures, out / "discovery", options, none)
        pictures, file = pictures.with_places(places, none), out / "finder.safetensors"
        first = out / "first-stage.safetensors" if options.candidates else file
        if not first.is_file():
            train_finder(finder, pictures, places, steps=options.steps, seed=seed, state=out / "finder.pt").save(first)
        if not file.is_file():
            stage: Any = read_policy_file(first)
            steps, count = options.steps * 5 // 12, options.candidates
            train_second_stage(stage, pictures, places, candidates=count, steps=steps, seed=seed).save(file)
        finder = read_policy_file(file)  # type: ignore[assignment]
        wrong = false_positives(detect(finder, pictures, 4), places)
        side = round(options.tokens**0.5) * model.patch_size
        glimpses = Glimpses(pictures, places, none=none, samples=side, mistaken=wrong, seed=seed)
        train_classifier(model, glimpses, epochs=options.epochs, state=out / "model.pt")
        model.prior = finder
        model.save_pretrained(out / "model")
    return model
