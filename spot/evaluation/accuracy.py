"""Accuracy of many placements in one pass over the images.

A setting is what places the tokens, how many, and a seed. Every image is decoded once for all
settings. Where an image's tokens go depends on the image, its key and the seed, never on the batch
or the process it lands in, so that one process or many give the same numbers.

    batches = loader(data_for(model, "imagenet"), 64, workers=4)
    found = evaluate(model, batches, [Setting("isotropic", 25), Setting("uniform", 25, seed=1)])
    found.rows()                     # a table: one row per placement and budget, seeds pooled
    found.ranks[0] == 0              # image by image: was setting 0 right?
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional as F

from spot import report
from spot.data.images import Batch, Loader
from spot.draws import generator_for
from spot.errors import InputError
from spot.placement.files import Placements
from spot.placement.priors import SALIENT_PRIORS, Prior

Maps = Callable[[Tensor, Sequence[str]], Tensor]  # images, keys → saliency (B, H, W)

CONFIDENCE = 1.959964  # standard deviations: 95 %


@dataclass(frozen=True)
class Setting:
    """One thing to measure.

    placement: a prior's name or function, placements read from a file, or another model that
        answers model(images, positions=None, generator=None), such as a PatchDropout.
    tokens: the budget; by default the model's own, or what the placements or other model have.
    seed: of random placements, together with each image's key.
    name: what tables call it; by default the prior's name or the other model's class.
    """

    placement: str | Prior | Placements | nn.Module
    tokens: int | None = None
    seed: int = 0
    name: str = ""

    @property
    def label(self) -> str:
        if self.name or isinstance(self.placement, str):
            return self.name or str(self.placement)
        if isinstance(self.placement, (nn.Module, Placements)):
            return type(self.placement).__name__
        return getattr(self.placement, "__name__", "prior")


@dataclass
class Evaluation:
    """What S settings made of M images, in the order of the images' keys."""

    settings: list[Setting]
    tokens: list[int]  # S budgets
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
        return [self._row(members) for members in self.groups()]

    def groups(self) -> list[list[int]]:
        """Settings that differ only in their seed."""
        groups: dict[tuple[str, int], list[int]] = {}
        for index, setting in enumerate(self.settings):
            groups.setdefault((setting.label, self.tokens[index]), []).append(index)
        return list(groups.values())

    def _row(self, members: list[int]) -> dict[str, Any]:
        first = members[0]
        top1, top5 = ((self.ranks[members] < top).double().mean(1) for top in (1, 5))
        # Seeds see the same images: they make the mean steadier, not the sample larger.
        low, high = wilson(top1.mean().item(), len(self.keys))
        return {
            "placement": self.settings[first].label,
            "tokens": self.tokens[first],
            "top1": 100 * top1.mean().item(),
            "low": 100 * low,
            "high": 100 * high,
            "top5": 100 * top5.mean().item(),
            "loss": self.losses[members].mean().item(),
            "std": 100 * top1.std().item() if len(members) > 1 else None,
            "seeds": len(members),
            "images": len(self.keys),
        }


def wilson(share: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval in which the true share lies (Wilson, 1927), if `count` draws had the share seen."""
    if count == 0:
        return 0.0, 1.0
    weight = confidence**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = confidence * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    # Of none or of all, rounding must not leave the share seen outside its own interval.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def evaluate(
    model: Any,
    batches: Loader,
    settings: Sequence[Setting],
    *,
    saliency: Maps | None = None,
    features: bool = False,
    accuracy: bool = True,
    shown: bool = True,
    title: str = "evaluating",
) -> Evaluation:
    """Measure settings on all images that `batches` brings, in this process and in all others.

    Args:
        model: a SpotViT; a setting that is itself a model does not use it.
        batches: as `spot.data.images.loader` makes them; of several processes each has its share.
        saliency: maps (B, H, W) for images and keys, for the salient, focus and background priors.
        features: also keep pooled features, for kNN.
        accuracy: False if labels are not the model's classes; then ranks are -1 and losses NaN.
        shown: a progress bar on a terminal, called `title`.
    """
    readers = [Reader(model, setting) for setting in settings]
    share = Share([[] for _ in settings])
    try:
        for batch, outputs in outcomes(readers, batches, saliency, features=features, title=title if shown else ""):
            share.keys += batch.keys
            share.labels.append(batch.labels)
            share.verdicts.append(torch.stack([judge(logits, batch, accuracy=accuracy) for logits, _ in outputs]))
            for kept, (_, pooled) in zip(share.features, outputs, strict=True):
                kept += [] if pooled is None else [pooled]
    except InputError as error:
        share.problem = str(error)
    shares = share.with_all_others(batches)
    keys = [key for each in shares for key in each.keys]
    order = sorted(range(len(keys)), key=keys.__getitem__)  # the same however many processes there were
    verdicts = torch.cat([part for each in shares for part in each.verdicts], 1)[:, order]
    return Evaluation(
        settings=list(settings),
        tokens=[reader.tokens for reader in readers],
        keys=sorted(keys),
        labels=torch.cat([part for each in shares for part in each.labels])[order],
        predictions=verdicts[..., 0].long(),
        ranks=verdicts[..., 1].long(),
        losses=verdicts[..., 2],
        features=[
            torch.cat([part for each in shares for part in each.features[index]])[order]
            for index in range(len(settings) if features else 0)
        ],
        seconds=max(each.seconds for each in shares),
        waited=max(each.waited for each in shares),
        skipped=sorted({key for each in shares for key in each.skipped}),
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


class Reader:
    """A setting made callable: images and keys → logits."""

    def __init__(self, model: Any, setting: Setting) -> None:
        self.seed = setting.seed
        self.prior: str | None = None  # one that draws from saliency maps
        self.placements: Placements | None = None
        self.model = copy.copy(model)  # shares the weights, has its own prior and budget
        if isinstance(setting.placement, nn.Module):
            self.model = setting.placement
            if setting.tokens not in (None, self.model.tokens):
                raise InputError(f"{setting.label} has {self.model.tokens} tokens, not {setting.tokens}")
        elif isinstance(setting.placement, Placements):
            self.placements = setting.placement
            if setting.tokens not in (None, self.placements.tokens):
                raise InputError(f"the placements have {self.placements.tokens} tokens, not {setting.tokens}")
            self.model.tokens = self.placements.tokens
        else:
            self.model.tokens = model.tokens if setting.tokens is None else setting.tokens
            if isinstance(setting.placement, str) and setting.placement in SALIENT_PRIORS:
                self.prior = setting.placement
            else:
                self.model.prior = setting.placement
        self.tokens = int(self.model.tokens)
        self.vit = getattr(self.model, "model", self.model).vit
        self.device = next(self.vit.parameters()).device

    def draws(self) -> bool:
        """Whether another seed would place tokens elsewhere."""
        if self.prior is not None or self.placements is not None or not hasattr(self.model, "place"):
            return self.prior is not None
        holder = getattr(self.model, "model", self.model)
        blank = torch.zeros(1, self.vit.patch_embed.proj.in_channels, *holder.img_size, device=self.device)
        here, there = (self.model.place(blank, generator_for(seed, "")) for seed in (0, 1))
        return not all(torch.equal(*pair) for pair in zip(here, there, strict=True))

    def __call__(self, images: Tensor, keys: Sequence[str], saliency: Maps | None = None) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        return self.model(images, self.place(images, keys, saliency))

    def place(self, images: Tensor, keys: Sequence[str], saliency: Maps | None = None) -> Any:
        """Positions (B, N, 2), each image's from its key and the seed alone; None for a plain ViT."""
        if self.placements is not None:
            return self.placements.positions_for(keys).to(images.device)
        if self.prior is None and not hasattr(self.model, "place"):
            return None
        singles = images.split(1)
        generators = [generator_for(self.seed, key) for key in keys]
        if self.prior is None:
            each = [self.model.place(*pair) for pair in zip(singles, generators, strict=True)]
        elif saliency is None:
            raise InputError(f"the {self.prior} prior reads saliency maps; say where they come from")
        else:
            draw, maps = SALIENT_PRIORS[self.prior], saliency(images, keys).split(1)
            each = [
                draw(known)(image, self.tokens, generator)
                for known, image, generator in zip(maps, singles, generators, strict=True)
            ]
        if isinstance(each[0], Tensor):
            return torch.cat(each)
        # More than positions, such as ElasticViT's windows: a named tuple of tensors.
        return type(each[0])(*map(torch.cat, zip(*each, strict=True)))


@torch.no_grad()
def outcomes(
    readers: Sequence[Reader],
    batches: Loader,
    saliency: Maps | None = None,
    *,
    features: bool = False,
    title: str = "",
) -> Iterator[tuple[Batch, list[tuple[Tensor, Tensor | None]]]]:
    """For every batch the logits (B, classes) and pooled features (B, D) of every reader, on the CPU."""
    with evaluating([reader.model for reader in readers]), report.progress(shown=bool(title)) as bar:
        task = bar.add_task(title, total=batches.samples)
        for batch in batches:
            images = batch.images.to(readers[0].device, non_blocking=True) if readers else batch.images
            known = once(saliency, images, batch.keys)
            outputs: list[tuple[Tensor, Tensor | None]] = []
            for reader in readers:
                with pooled(reader.vit) as seen:
                    logits = reader(images, batch.keys, known).float().cpu()
                outputs.append((logits, seen[-1].float().cpu() if features else None))
            yield batch, outputs
            bar.advance(task, len(batch.keys))


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode, and afterwards every part as it was: a training loop may be waiting."""
    modes = [(part, part.training) for model in models for part in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def pooled(vit: Any) -> Iterator[list[Tensor]]:
    """What enters the classifier while the model runs: timm's forward_head(…, pre_logits=True)."""
    seen: list[Tensor] = []
    hook = vit.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()


def once(saliency: Maps | None, images: Tensor, keys: Sequence[str]) -> Maps | None:
    """Saliency that looks at a batch once, however many settings draw from it."""
    if saliency is None:
        return None
    maps: list[Tensor] = []

    def known(_images: Tensor, _keys: Sequence[str]) -> Tensor:
        if not maps:
            maps.append(saliency(images, keys))
        return maps[0]

    return known


@dataclass
class Share:
    """What one process found."""

    features: list[list[Tensor]]  # per setting and batch
    keys: list[str] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)  # per batch (B,)
    verdicts: list[Tensor] = field(default_factory=list)  # per batch (S, B, 3)
    problem: str = ""
    seconds: float = 0.0
    waited: float = 0.0
    skipped: list[str] = field(default_factory=list)

    def with_all_others(self, batches: Loader) -> list["Share"]:
        """The shares of all processes. A problem of one is raised in all: they would wait for it for ever."""
        self.seconds, self.waited, self.skipped = batches.seconds, batches.waited, batches.skipped
        shares: list[Share] = gather_object([self])
        for share in shares:
            if share.problem:
                raise InputError(share.problem)
        if not any(share.keys for share in shares):
            raise InputError("no image could be read, so there is nothing to measure")
        return shares
