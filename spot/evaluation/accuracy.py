"""Accuracy of many placements in one pass over the images.

A setting is what places the tokens, how many, a seed, and the model. Every image is decoded once for all
settings. Where an image's tokens go depends on the image, its key and the seed, never on the batch or the
process it lands in, so that one process or many give the same numbers.

    batches = loader(data_for(model, "imagenet"), 64, workers=4)
    result = evaluate(model, batches, [Setting("isotropic", 25), Setting("patch-dropout", 25, seed=1)])
    result.rows()                    # a table: one row per placement and budget, seeds pooled
    result.ranks[0] == 0             # image by image: was setting 0 right?
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import functional as F

from spot import report
from spot.data.images import data_for
from spot.data.loader import Batch, Loader, loader
from spot.errors import InputError, check_kind
from spot.models.baselines import BASELINES
from spot.models.family import Family, Source, at_budget
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.wrappers import TokenModel
from spot.placement.files import Placements
from spot.placement.oracle import frozen
from spot.placement.priors import AnyPrior, resolve_prior
from spot.placement.sizes import Scale

Maps = Callable[[Tensor, Sequence[str]], Tensor]  # images, keys → saliency (B, H, W)

CONFIDENCE = 1.959964  # standard deviations: 95 %


@dataclass(frozen=True)
class Setting:
    """Something to measure: where tokens go, how many, a seed, and the model.

    placement: a prior's name or function, placements read from a file, or a name in BASELINES; by
        default the model's own prior.
    tokens: the budget; by default the model's own, or what the placements have.
    seed: of random placements, together with each image's key.
    name: what tables call it; by default the name of the prior or baseline.
    scale: of the windows that a prior places; by default the model's own.
    model: a SpotViT or a baseline; by default the one that `evaluate` is given. A baseline places by itself.
    """

    placement: AnyPrior | Placements | None = None
    tokens: int | None = None
    seed: int = 0
    name: str = ""
    scale: Scale | None = None
    model: TokenModel | None = None

    def __post_init__(self) -> None:
        if isinstance(self.placement, Placements):
            if self.tokens not in (None, self.placement.tokens):
                raise InputError(f"the placements have {self.placement.tokens} tokens, not {self.tokens}")
        elif self.model is not None and self.placement is not None:
            resolve_prior(self.placement)  # refuses what is no prior
        elif self.model is not None and self.tokens not in (None, self.model.tokens):
            raise InputError(f"{self.label} has {self.model.tokens} tokens, not {self.tokens}")

    def of(self, source: Source) -> "Setting":
        """The setting with its model: with the weights for its budget, or the baseline of its name on them."""
        if self.model is not None:
            return self
        if isinstance(self.placement, str) and self.placement in BASELINES:
            baseline = BASELINES[self.placement].build(source, self.tokens)
            return Setting(seed=self.seed, name=self.label, model=baseline)
        tokens = self.placement.tokens if isinstance(self.placement, Placements) else self.tokens
        model = source if isinstance(source, SpotViT) else at_budget(source, tokens)
        return replace(self, placement=model.prior if self.placement is None else self.placement, model=model)

    @property
    def bound(self) -> TokenModel:
        """The model, of a setting that has one; see `of`."""
        assert self.model is not None, "a setting is measured with a model: setting.of(model)"
        return self.model

    @property
    def label(self) -> str:
        if self.name or isinstance(self.placement, str):
            return self.name or str(self.placement)
        if self.placement is None:
            return "own" if self.model is None else type(self.model).__name__
        return "Placements" if isinstance(self.placement, Placements) else resolve_prior(self.placement).name

    @property
    def budget(self) -> int:
        """How many tokens."""
        if isinstance(self.placement, Placements):
            return self.placement.tokens
        return self.bound.tokens if self.tokens is None else self.tokens

    @property
    def random(self) -> bool:
        """Whether another seed would place tokens elsewhere."""
        if isinstance(self.placement, Placements):
            return False
        return self.bound.random if self.placement is None else resolve_prior(self.placement).random

    @property
    def needs_map(self) -> bool:
        """Whether the prior reads saliency maps."""
        if self.placement is None or isinstance(self.placement, Placements):
            return False
        return resolve_prior(self.placement).needs_map

    @property
    def module(self) -> TokenModel:
        """A model that places so by itself, `module(images)`: for timing and for counting its cost."""
        if isinstance(self.model, SpotViT):
            prior = None if isinstance(self.placement, Placements) else self.placement
            return self.model.at(tokens=self.budget, prior=prior, scale=self.scale)
        return self.bound

    def place(self, images: Tensor, keys: Sequence[str], saliency: Maps | None = None) -> Tensor:
        """Positions (B, N, 2), each image's from its key and the seed alone."""
        if isinstance(self.placement, Placements):
            return self.placement.positions_for(keys).to(images.device)
        if self.placement is None:
            return self.bound.place(images, keys=keys, seed=self.seed)
        maps = saliency(images, keys) if saliency is not None and self.needs_map else None
        how: dict[str, Any] = {"keys": keys, "seed": self.seed, "maps": maps}
        how |= {} if self.scale is None else {"scale": self.scale}
        return self.bound.place(images, tokens=self.tokens, prior=self.placement, **how)


@dataclass
class Evaluation:
    """Predictions of S settings for M images, in the order of the images' keys."""

    settings: list[Setting]
    keys: list[str]  # M
    labels: Tensor  # (M,) int64
    predictions: Tensor  # (S, M) int64, the class predicted
    ranks: Tensor  # (S, M) int64, how many classes came before the label: 0 is right, below 5 top-5
    losses: Tensor  # (S, M) float64, cross-entropy
    features: list[Tensor]  # S × (M, D) float32, pooled, before the classifier; empty unless asked for
    seconds: float = 0.0  # the slowest process's pass over the data
    waited: float = 0.0  # how long of that it stood still for data
    skipped: list[str] = field(default_factory=list)  # images that could not be read

    def rows(self) -> list[dict[str, Any]]:
        """One row per placement and budget: percentages, with seeds pooled and 95 % intervals."""
        return [self.row(members) for members in self.groups()]

    def groups(self) -> list[list[int]]:
        """Settings that differ only in their seed."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, each in enumerate(self.settings):
            given = id(each.placement) if isinstance(each.placement, Placements) else None
            groups.setdefault((each.label, each.budget, each.scale, each.bound.spot_vit, given), []).append(index)
        return list(groups.values())

    def row(self, members: list[int]) -> dict[str, Any]:
        """The row of settings that differ only in their seed."""
        first = self.settings[members[0]]
        top1, top5 = ((self.ranks[members] < top).double().mean(1) for top in (1, 5))
        # Seeds see the same images: they make the mean steadier, not the sample larger.
        low, high = wilson(top1.mean().item(), len(self.keys))
        return {
            "placement": first.label,
            "tokens": first.budget,
            "top1": 100 * top1.mean().item(),
            "low": 100 * low,
            "high": 100 * high,
            "top5": 100 * top5.mean().item(),
            "loss": self.losses[members].mean().item(),
            "std": 100 * top1.std().item() if len(members) > 1 else None,
            "seeds": len(members),
            "images": len(self.keys),
        }


def with_models(source: Source, settings: Sequence[Setting | str]) -> list[Setting]:
    """Settings, or names of priors and baselines, with their models. Those of one budget share one model."""
    made: dict[int, SpotViT] = {}
    bound = []
    for each in settings:
        setting = (Setting(each) if isinstance(each, str) else each).of(source)
        if isinstance(source, Family) and isinstance(setting.model, SpotViT) and each is not setting:
            setting = replace(setting, model=made.setdefault(setting.budget, setting.model))
        bound.append(setting)
    return bound


def wilson(share: float, count: int) -> tuple[float, float]:
    """The interval in which the true share lies (Wilson, 1927), if `count` draws had the share seen."""
    if count == 0:
        return 0.0, 1.0
    weight = CONFIDENCE**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = CONFIDENCE * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    # Of none or of all, rounding must not leave the share seen outside its own interval.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def evaluate(
    model: Source,
    data: Loader | str | Path,
    settings: Sequence[Setting | str] = (Setting(),),
    *,
    saliency: Maps | None = None,
    features: bool = False,
    accuracy: bool = True,
    shown: bool = True,
    title: str = "evaluating",
) -> Evaluation:
    """Measure settings on all images of some data, in this process and in all others.

        spot.evaluate(model, "imagenet", ["isotropic", "patch-dropout"]).rows()
        spot.evaluate(model, "scenes", [spot.Setting("center", tokens) for tokens in (9, 16)]).rows()

    Args:
        model: what settings are measured with unless they bring a model, or a family, which has weights for each
            budget.
        data: what `spot.data.images.data_for` takes, or batches as `loader` makes them; of several processes each
            has its share.
        settings: by default the model's own prior and budget; a name is a prior or a baseline.
        saliency: maps (B, H, W) for images and keys, for priors that need them; by default `model.saliency_maps`.
        features: also keep pooled features, for kNN.
        accuracy: False if labels are not the model's classes; then ranks are -1 and losses NaN.
        shown: a progress bar on a terminal, called `title`.

    Several threads may evaluate and search with one model: it is in evaluation mode until the last has ended.
    """
    check_kind("model", model, SpotViT, Family)
    check_kind("data", data, Loader, str, Path)
    check_kind("settings", settings, list, tuple)
    bound = with_models(model, settings)
    models = [each.bound for each in bound]
    some = models[0].spot_vit if isinstance(model, Family) else model
    batches = data if isinstance(data, Loader) else loader(data_for(some, data))
    maps = some.saliency_maps if saliency is None else saliency
    done: list[tuple[list[str], Tensor, Tensor, list[Tensor]]] = []  # keys, labels, results (S, B, 3), features
    problem = ""
    try:
        with torch.no_grad(), frozen(*models), report.progress(shown=shown) as bar:
            task = bar.add_task(title, total=batches.samples)
            for batch in batches:
                images = batch.images.to(next(models[0].parameters()).device, non_blocking=True)
                known = once(maps, images, batch.keys)
                results, pooled = [], []
                for setting in bound:
                    head = head_of(setting.bound, images, setting.place(images, batch.keys, known))
                    results.append(judge(head().float().cpu(), batch, accuracy=accuracy))
                    pooled += [head(pre_logits=True).float().cpu()] if features else []
                done.append((batch.keys, batch.labels, torch.stack(results), pooled))
                bar.advance(task, len(batch.keys))
    except InputError as error:
        problem = str(error)
    shares = gather_object([(problem, done, batches.seconds, batches.waited, batches.skipped)])
    for problem, *_ in shares:  # of one process, raised in all: the others would wait for it for ever
        if problem:
            raise InputError(problem)
    parts = [part for _, done, *_ in shares for part in done]
    if not parts:
        raise InputError("no image could be read, so there is nothing to measure")
    keys = [key for part in parts for key in part[0]]
    order = sorted(range(len(keys)), key=keys.__getitem__)  # the same however many processes there were
    outcomes = torch.cat([part[2] for part in parts], 1)[:, order]
    return Evaluation(
        settings=bound,
        keys=sorted(keys),
        labels=torch.cat([part[1] for part in parts])[order],
        predictions=outcomes[..., 0].long(),
        ranks=outcomes[..., 1].long(),
        losses=outcomes[..., 2],
        features=[torch.cat(each)[order] for each in zip(*(part[3] for part in parts), strict=True)],
        seconds=max(each[2] for each in shares),
        waited=max(each[3] for each in shares),
        skipped=sorted({key for each in shares for key in each[4]}),
    )


def judge(logits: Tensor, batch: Batch, *, accuracy: bool = True) -> Tensor:
    """Prediction, rank of the label and cross-entropy of each image: (B, 3) float64."""
    classes, labels = logits.shape[1], batch.labels
    predictions = logits.argmax(1).double()
    if not accuracy:
        return torch.stack([predictions, predictions * 0 - 1, predictions * torch.nan], 1)
    for label, key in zip(labels.tolist(), batch.keys, strict=True):
        if not 0 <= label < classes:
            what = f"label {label}, but the model has {classes} classes" if label >= 0 else "no label"
            raise InputError(f"accuracy needs labels; image {key} has {what}")
    logits = logits.double()
    own = logits.gather(1, labels[:, None])
    # A tie goes to the lower class, as in argmax; written so that NaN logits count as wrong.
    ahead = ~(logits <= own) | ((logits == own) & (torch.arange(classes) < labels[:, None]))
    loss = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([predictions, ahead.sum(1).double(), loss], 1)


def head_of(model: TokenModel, images: Tensor, positions: Tensor) -> Callable[..., Tensor]:
    """The model's head on the features of images: () gives logits, (pre_logits=True) what enters the classifier."""
    if isinstance(model, ToMe):  # whose tokens weigh as many as they stand for
        merged = model.merge(images, positions)
        return partial(model.forward_head, merged.features, sizes=merged.sizes)
    return partial(model.forward_head, model.forward_features(images, positions))


def once(saliency: Maps, images: Tensor, keys: Sequence[str]) -> Maps:
    """Saliency that looks at a batch once, however many settings draw from it."""
    maps = functools.cache(lambda: saliency(images, keys))
    return lambda *_: maps()
