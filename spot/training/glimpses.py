"""Fine-tune a model to classify large pictures from glimpses: squares around the places that matter.

Glimpses are cut out as tokens sample them, so a training step costs what a small image costs, and the weights read
the same glimpses in the whole picture (spot/placement/glimpses.py). First a linear head is fitted on frozen features
of a few random views of each glimpse; then all weights are trained for some epochs, with lower rates in earlier blocks.

A picture whose class has nothing to find (no places at all: "none") shows glimpses of random squares, and of places
that a finder takes for something. So does, now and then, any other picture, away from its own places.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spot import report
from spot.data.images import listed
from spot.data.pictures import Pictures, boxes_to_places, read_boxes
from spot.draws import Draw, seeded
from spot.errors import InputError
from spot.models.family import Source, at_budget, dense_model
from spot.models.spot_vit import SpotViT
from spot.options import GlimpseOptions
from spot.placement.finder import Finder
from spot.placement.glimpses import cut_out
from spot.placement.policy import read_policy_file
from spot.store import as_json, locked, read_json, read_state, refuse_difference, write_json, write_state
from spot.training.finder import places_found, shrink, train_finder, train_second_stage
from spot.training.fresh import with_classifier

Places = Mapping[str, Tensor]  # (n, 4) by key: y, x and size in pixels, weight
ELSEWHERE = 0.2  # the share of glimpses that are beside the places, of the class with nothing to find
KEPT = 0.75  # rate of a block against the next


class Glimpses:
    """Random glimpses of pictures, with their labels.

    Args:
        places: by key; pictures without any are of the class `none`.
        mistaken: by key, places that look like something and are not.
        none: the class with nothing to find, or None where every picture has something.
        margin: the side of a glimpse in sizes of the place.
        usual: mean and width of the logarithm of sizes, for random squares.
    """

    def __init__(
        self,
        pictures: Pictures,
        places: Places,
        *,
        none: int | None,
        samples: int,
        margin: float = 1.25,
        mistaken: Places | None = None,
        seed: int = 0,
    ) -> None:
        self.pictures, self.places, self.mistaken = pictures, places, mistaken or {}
        self.none, self.samples, self.margin, self.seed = none, samples, margin, seed
        logs = torch.cat([each[:, 2] for each in places.values()]).log()
        self.usual = (float(logs.mean()), float(logs.std()) if len(logs) > 1 else 0.3)

    def batch(self, rows: Sequence[int], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Normalised glimpses (B, 3, S, S), from 0 in the middle of their range, and labels (B,)."""
        views, labels = [], []
        for row in rows:
            place, label = self.one(row, draw)
            views.append(lit(cut_out(self.pictures.pixels(row), *place, self.samples) / 255, draw))
            labels.append(label)
        return torch.stack(views) * 2 - 1, torch.tensor(labels)

    def one(self, row: int, draw: np.random.Generator) -> tuple[tuple[float, float, float], int]:
        """(y, x, side) in pixels, moved and resized a little, and the label."""
        key, label = self.pictures.keys[row], self.pictures.labels[row]
        own = self.places.get(key, torch.zeros(0, 4))
        height, width = self.pictures.pixels(row).shape[1:]
        if len(own) and not (self.none is not None and draw.random() < ELSEWHERE):
            share = own[:, 3].numpy().astype(float)
            place = own[draw.choice(len(own), p=share / share.sum())]
        elif len(wrong := self.mistaken.get(key, torch.zeros(0, 4))) and draw.random() < 0.7:
            place, label = wrong[draw.integers(len(wrong))], self.none if self.none is not None else label
        else:
            label = self.none if self.none is not None else label
            for _ in range(20):  # away from the places
                size = math.exp(draw.normal(*self.usual))
                place = torch.tensor([draw.uniform(0, height), draw.uniform(0, width), size])
                if ((own[:, :2] - place[:2]).abs().amax(1) > own[:, 2] + size).all():
                    break
        y, x, size = place[:3].tolist()
        side = min(self.margin * size * math.exp(draw.normal(0, 0.18)), float(min(height, width)))
        y, x = (middle + draw.normal(0, 0.09) * side for middle in (y, x))
        return (min(max(y, 0.0), height), min(max(x, 0.0), width), max(4.0, side)), label


def lit(view: Tensor, draw: np.random.Generator) -> Tensor:
    """A view (3, H, W) from 0 to 1 in other light: brightness, contrast and saturation change at random."""
    view = view * draw.uniform(0.6, 1.5) + draw.uniform(-0.12, 0.12)
    grey = view.mean(0, keepdim=True)
    return grey + (view - grey) * draw.uniform(0.6, 1.4)


class Views(Protocol):
    """Random views of pictures for `train_classifier`, such as Glimpses."""

    pictures: Pictures
    seed: int

    def batch(self, rows: Sequence[int], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Normalised views (B, 3, H, W) and labels (B,) of the pictures of these rows."""


@torch.no_grad()
def pooled(model: SpotViT, views: Tensor, batch: int = 24) -> Tensor:
    """Features (B, D) of glimpses (B, 3, S, S)."""
    parts = views.split(batch)
    return torch.cat(
        [model.forward_head(model.forward_features(part, model.grid(part)), pre_logits=True) for part in parts]
    )


def fit_head(model: SpotViT, features: Tensor, labels: Tensor, decay: float = 1e-2) -> None:
    """Set the head by logistic regression on features (M, D), standardised, with an L2 penalty."""
    mean, width = features.mean(0), features.std(0) + 1e-6
    x = (features - mean) / width
    weight = torch.zeros(features.shape[1], model.num_classes, requires_grad=True)
    bias = torch.zeros(model.num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=80, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, labels) + decay * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    with torch.no_grad():
        model.vit.head.weight.copy_((weight / width[:, None]).T)
        model.vit.head.bias.copy_(bias - (mean / width) @ weight)


def train_classifier(
    model: SpotViT,
    glimpses: Views,
    *,
    epochs: int = 8,
    views: int = 3,
    batch: int = 24,
    lr: float = 1e-4,
    smoothing: float = 0.05,
    state: Path | None = None,
) -> SpotViT:
    """Fit the head of a model on glimpses, then train all of it for so many epochs; the model is changed and returned.

    views: random glimpses of each picture that the head is fitted on.
    state: a file from which an interrupted run goes on, removed in the end.
    """
    draw, count = np.random.default_rng(glimpses.seed), len(glimpses.pictures)
    steps_each = max(1, count // batch)
    steps, first = epochs * steps_each, 0
    optimizer = torch.optim.AdamW(groups(model), lr)
    if state is not None and state.is_file():
        saved = read_state(state)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    else:
        rows = [int(row) for _ in range(views) for row in draw.permutation(count)]
        taken = [rows[begin : begin + batch] for begin in range(0, len(rows), batch)]
        made = []
        for part in report.track(taken, "features", len(taken)):
            seen, labels = glimpses.batch(part, draw)
            made.append((pooled(model.eval(), seen), labels))
        features, known = (torch.cat(column) for column in zip(*made, strict=True))
        fit_head(model, features, known)
    order: list[int] = []
    for step in report.track(range(first, steps), "fine-tuning", steps - first):
        if len(order) < batch:
            order = [int(row) for row in draw.permutation(count)]
        part, order = order[:batch], order[batch:]
        rate = lr * min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * group["share"]
        seen, labels = glimpses.batch(part, draw)
        loss = F.cross_entropy(model.train()(seen, model.grid(seen)), labels, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if state is not None and step % 20 == 19:
            write_state(state, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    if state is not None:
        state.unlink(missing_ok=True)
    return model.eval()


def groups(model: SpotViT) -> list[dict[str, object]]:
    """Every parameter with its weight decay and its share of the learning rate, lower in earlier blocks."""
    depth, made = len(model.vit.blocks), []
    for name, parameter in model.vit.named_parameters():
        level = depth + 1 if name.startswith(("head", "norm", "fc_norm")) else 0
        level = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else level
        decay = 0.05 if parameter.ndim > 1 else 0.0
        made.append({"params": [parameter], "weight_decay": decay, "share": KEPT ** (depth + 1 - level)})
    return made


# All steps for a folder of pictures


def learn_to_find(
    source: Source,
    data: str | Path,
    out: str | Path,
    how: GlimpseOptions | None = None,
    *,
    boxes: str | Path | None = None,
    split: str = "train",
    leave_out: Path | None = None,
) -> SpotViT:
    """Teach a model to classify large pictures from glimpses that it finds itself; write it to the folder `out`.

    What each step made is kept in `out`, so that the same command goes on after an interruption.

    Args:
        source: a model or family, such as spot.load("vit-ti").
        data: a folder with one sub-folder per class, perhaps below train and val.
        boxes: a CSV file with the columns file, left, top, right, bottom; without it places are discovered from labels.
        leave_out: a file that names pictures never to train on, one a line.
    """
    out, how = Path(out), how or GlimpseOptions()
    pictures = Pictures.open(data, split)
    if leave_out is not None:
        pictures = pictures.part(set(pictures.keys) - set(listed(leave_out)))
    none = pictures.classes.index(how.none) if how.none in pictures.classes else None
    settings = as_json(
        {**asdict(how), "pictures": len(pictures), "boxes": boxes is not None, "classes": pictures.classes}
    )
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, str(out)), seeded(how.seed, Draw.WEIGHTS):
        if (out / "settings.json").is_file():
            advice = f"delete {out} to begin again"
            refuse_difference(str(out), read_json(out / "settings.json"), settings, advice)
        write_json(out / "settings.json", settings)
        model = with_classifier(at_budget(source, how.tokens), len(pictures.classes), None, how.seed, anew=True)
        model.class_names = list(pictures.classes)
        about = {"model": model.name, "made": settings}
        finder = Finder(model.patch_size, longest=how.longest, about=about)
        for index, key in enumerate(pictures.keys):
            try:
                finder.refuse(pictures.pixels(index)[None])
            except InputError as error:
                raise InputError(f"{key}: {error}") from None
        if boxes is not None:
            places = boxes_to_places(read_boxes(boxes, pictures))
        else:
            from spot.training.discovery import discover

            if none is None:
                raise InputError(
                    f"without boxes one class must be of pictures with nothing to find, as --none {how.none}"
                )
            scout = Finder(model.patch_size, longest=how.longest)
            options = {"none": none, "tokens": how.tokens, "rounds": how.rounds, "seed": how.seed}
            places = discover(model.eval(), dense_model(source).eval(), scout, pictures, out / "discovery", **options)
        known, file = pictures.with_places(places, none), out / "finder.safetensors"
        first = out / "first-stage.safetensors" if how.candidates else file
        if not first.is_file():
            train_finder(finder, known, places, steps=how.steps, seed=how.seed, state=out / "finder.pt").save(first)
        if not file.is_file():
            stage = read_policy_file(first)
            train_second_stage(stage, known, places, candidates=how.candidates, seed=how.seed).save(file)  # type: ignore[arg-type]
        finder = read_policy_file(file)  # type: ignore[assignment]
        wrong = mistakes(finder, known, places)
        side = round(how.tokens**0.5) * model.patch_size
        seen = Glimpses(known, places, none=none, samples=side, mistaken=wrong, seed=how.seed)
        train_classifier(model, seen, epochs=how.epochs, state=out / "model.pt")
        model.prior = finder
        model.save_pretrained(out / "model")
    return model


@torch.no_grad()
def mistakes(finder: Finder, pictures: Pictures, places: Places, count: int = 4) -> dict[str, Tensor]:
    """The places that a finder finds and that are none, by key."""
    small, wrong = shrink(finder, pictures), {}
    for index, key in enumerate(pictures.keys):
        found = places_found(finder, pictures.pixels(index), small[index], count)
        known = places.get(key, torch.zeros(0, 4))
        apart = (found[:, None, :2] - known[None, :, :2]).abs().amax(-1) > known[None, :, 2]
        wrong[key] = found[apart.all(1)]
    return wrong
