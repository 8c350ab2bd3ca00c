"""Accuracy of many placements in one pass over the images.

A setting consists of a placement, a number of tokens, a seed and a model. Each image is decoded once for all
settings. Its token positions depend on the image, its key and the seed, but not on the batch or process.
Any number of processes therefore gives the same results.

    batches = loader(data_for(model, "imagenet"), 64, workers=4)
    result = evaluate(model, batches, [Setting("isotropic", 25), Setting("patch-dropout", 25, seed=1)])
    result.rows()                    # a table: one row per placement and budget, seeds pooled
    result.ranks[0] == 0             # per image: whether the prediction of setting 0 is correct
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
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
from spot.placement.priors import AnyPrior, check_tokens, resolve_prior
from spot.placement.sizes import Scale

Maps = Callable[[Tensor, Sequence[str]], Tensor]  # images, keys → saliency (B, H, W)

CONFIDENCE = 1.959964  # standard deviations, for 95 %


@dataclass(frozen=True)
class Setting:
    """A configuration to evaluate: placement, number of tokens, seed and model.

    placement: a prior's name or function, placements read from a file, or a name in BASELINES; by
        default the model's prior.
    tokens: the budget; by default the number of the placements, or the model's default.
    seed: seed of random placements, combined with each image's key.
    name: name in tables; by default that of the prior or baseline.
    scale: scale of a prior's windows; by default the model's.
    model: a SpotViT or a baseline; by default the model passed to `evaluate`. A baseline places its own tokens.

    `with_models` fills in name, tokens and model. The properties and `place` need the model.
    """

    placement: AnyPrior | Placements | None = None
    tokens: int | None = None
    seed: int = 0
    name: str = ""
    scale: Scale | None = None
    model: TokenModel | None = None

    @property
    def random(self) -> bool:
        """Whether the placement depends on the seed."""
        return not isinstance(self.placement, Placements) and model_of(self).random

    @property
    def needs_map(self) -> bool:
        """Whether the prior needs saliency maps."""
        if isinstance(self.placement, Placements) or not isinstance(self.model, SpotViT):
            return False
        return self.model.resolved_prior().needs_map

    def place(self, images: Tensor, keys: Sequence[str], maps: Tensor | None = None) -> Tensor:
        """Positions (B, N, 2). Randomness depends only on an image's key and the seed.

        maps: saliency (B, H, W), for priors that need it.
        """
        if isinstance(self.placement, Placements):
            return self.placement.positions_for(keys).to(images.device)
        return model_of(self).place(images, keys=keys, seed=self.seed, maps=maps if self.needs_map else None)


def model_of(setting: Setting) -> TokenModel:
    """The model of a setting that has one; called as `model(images)` it places the setting's tokens."""
    assert setting.model is not None, "with_models gives a setting its model"
    return setting.model


def with_models(source: Source, settings: Sequence[Setting | str]) -> list[Setting]:
    """Settings, or names of priors and baselines, with their models, tokens and names.

    A model has the setting's budget, prior and scale. Settings of one budget share weights.
    """

    @cache
    def build(baseline: str | None, tokens: int | None) -> TokenModel:
        return BASELINES[baseline].build(source, tokens) if baseline else at_budget(source, tokens)

    return [_with_model(Setting(each) if isinstance(each, str) else each, build) for each in settings]


def _with_model(setting: Setting, build: Callable[[str | None, int | None], TokenModel]) -> Setting:
    placement, tokens, model, name = setting.placement, setting.tokens, setting.model, setting.name
    if tokens is not None:
        check_tokens(tokens)
    if isinstance(placement, Placements):
        if tokens not in (None, placement.tokens):
            raise InputError(f"the placements have {placement.tokens} tokens, not {tokens}")
        model = build(None, placement.tokens) if model is None else model
        if isinstance(model, SpotViT):
            model = model.at(tokens=placement.tokens, scale=setting.scale)
        return replace(setting, tokens=placement.tokens, name=name or "Placements", model=model)
    if model is None and isinstance(placement, str) and placement in BASELINES:
        model = build(placement, tokens)
        return replace(setting, placement=None, tokens=model.tokens, name=name or placement, model=model)
    model = build(None, tokens) if model is None else model
    if isinstance(model, SpotViT):
        model = model.at(tokens=tokens, prior=placement, scale=setting.scale)
        name = name or resolve_prior(model.prior if placement is None else placement).name
    elif placement is not None:
        raise InputError(f"{type(model).__name__} places tokens in its own way; a prior goes with its SpotViT")
    name = name or type(model).__name__
    if tokens not in (None, model.tokens):
        raise InputError(f"{name} has {model.tokens} tokens, not {tokens}")
    return replace(setting, tokens=model.tokens, name=name, model=model)


@dataclass
class Evaluation:
    """Predictions of S settings for M images, sorted by the images' keys."""

    settings: list[Setting]
    keys: list[str]  # M
    labels: Tensor  # (M,) int64
    predictions: Tensor  # (S, M) int64, the predicted class
    ranks: Tensor  # (S, M) int64, number of classes ranked before the label: 0 is correct, below 5 is top-5
    losses: Tensor  # (S, M) float64, cross-entropy
    features: list[Tensor]  # S × (M, D) float32, pooled, before the classifier; empty by default
    seconds: float = 0.0  # duration of the slowest process's pass over the data
    waited: float = 0.0  # the longest time that a process waited for data
    skipped: list[str] = field(default_factory=list)  # images that could not be read

    def rows(self) -> list[dict[str, Any]]:
        """One row per placement and budget: percentages averaged over seeds, with 95 % intervals."""
        return [self.row(members) for members in self.groups()]

    def groups(self) -> list[list[int]]:
        """Group the indices of settings that differ only in their seed."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, each in enumerate(self.settings):
            placement = each.placement if isinstance(each.placement, str) else id(each.placement)
            key = (each.name, each.tokens, each.scale, placement, model_of(each).spot_vit.vit)
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def row(self, members: list[int]) -> dict[str, Any]:
        """The row of a group of settings that differ only in their seed."""
        first = self.settings[members[0]]
        top1, top5 = ((self.ranks[members] < top).double().mean(1) for top in (1, 5))
        return {
            "placement": first.name,
            "tokens": first.tokens,
            # All seeds use the same images. They reduce the variance of the mean but do not enlarge the sample.
            **top1_row(top1.mean().item(), len(self.keys)),
            "top5": 100 * top5.mean().item(),
            "loss": self.losses[members].mean().item(),
            "std": 100 * top1.std().item() if len(members) > 1 else None,
            "seeds": len(members),
            "images": len(self.keys),
        }


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson, 1927), given the `share` observed in `count` samples."""
    if count == 0:
        return 0.0, 1.0
    weight = CONFIDENCE**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = CONFIDENCE * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    # For a share of 0 or 1, rounding must not exclude the share from its interval.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def top1_row(share: float, count: int) -> dict[str, float]:
    """Top-1 accuracy and its 95 % interval in percent, given the share of `count` images that is correct."""
    low, high = wilson(share, count)
    return {"top1": 100 * share, "low": 100 * low, "high": 100 * high}


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
    """Evaluate settings on all images of a data set, in all processes together.

        spot.evaluate(model, "imagenet", ["isotropic", "patch-dropout"]).rows()
        spot.evaluate(model, "scenes", [spot.Setting("center", tokens) for tokens in (9, 16)]).rows()

    Args:
        model: the model of settings without one, or a family, which has weights for each budget.
        data: an argument for `spot.data.images.data_for`, or batches of `loader`. With several processes, each
            passes its own share of the batches.
        settings: by default the model's prior and budget. A name is that of a prior or a baseline.
        saliency: maps images and keys to saliency (B, H, W), for priors that need it; default `model.saliency_maps`.
        features: also keep pooled features, for kNN.
        accuracy: False if labels are not the model's classes; then ranks are -1 and losses NaN.
        shown: show a progress bar with this `title`, if on a terminal.

    Several threads may evaluate and search with one model. It stays in evaluation mode until the last one ends.
    """
    check_kind("model", model, SpotViT, Family)
    check_kind("data", data, Loader, str, Path)
    check_kind("settings", settings, list, tuple)
    if not settings:
        raise InputError("at least one setting is needed, got none")
    for setting in settings:
        check_kind("a setting", setting, Setting, str)
    bound = with_models(model, settings)
    models = [model_of(setting) for setting in bound]
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
                batch_maps = maps(images, batch.keys) if any(setting.needs_map for setting in bound) else None
                results, pooled = [], []
                for setting in bound:
                    positions = setting.place(images, batch.keys, batch_maps)
                    tokens, head = features_and_head(model_of(setting), images, positions)
                    results.append(judge(head(tokens).float().cpu(), batch, accuracy=accuracy))
                    pooled += [head(tokens, pre_logits=True).float().cpu()] if features else []
                done.append((batch.keys, batch.labels, torch.stack(results), pooled))
                bar.advance(task, len(batch.keys))
    except InputError as error:
        problem = str(error)
    shares = gather_object([(problem, done, batches.seconds, batches.waited, batches.skipped)])
    for problem, *_ in shares:  # an error in one process is raised in all, which would otherwise wait forever
        if problem:
            raise InputError(problem)
    parts = [part for _, done, *_ in shares for part in done]
    if not parts:
        raise InputError("no image could be read, so there is nothing to measure")
    keys = [key for part in parts for key in part[0]]
    order = sorted(range(len(keys)), key=keys.__getitem__)  # independent of the number of processes
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
    """The prediction, the label's rank and the cross-entropy of each image: (B, 3) float64."""
    classes, labels = logits.shape[1], batch.labels
    predictions = logits.argmax(1).double()
    if not accuracy:
        return torch.stack([predictions, predictions * 0 - 1, predictions * torch.nan], 1)
    for label, key in zip(labels.tolist(), batch.keys, strict=True):
        if not 0 <= label < classes:
            what = f"label {label}, but the model has {classes} classes" if label >= 0 else "no label"
            raise InputError(f"accuracy needs labels; image {key} has {what}")
    logits = logits.double()
    of_label = logits.gather(1, labels[:, None])
    # The lower class index wins a tie, as in argmax. In this form, NaN logits count as wrong.
    ahead = ~(logits <= of_label) | ((logits == of_label) & (torch.arange(classes) < labels[:, None]))
    loss = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([predictions, ahead.sum(1).double(), loss], 1)


def features_and_head(
    model: TokenModel, images: Tensor, positions: Tensor | None
) -> tuple[Tensor, Callable[..., Tensor]]:
    """Token features, and the model's head: head(features) gives logits, with pre_logits=True the classifier's input.

    positions: by default the model's own placement.
    """
    if isinstance(model, ToMe):  # merged tokens are weighted by their sizes
        merged = model.merge(images, positions)
        return merged.features, partial(model.forward_head, sizes=merged.sizes)
    return model.forward_features(images, positions), model.forward_head
