"""Evaluation of features without a classifier: weighted k nearest neighbours as in DINO (Caron et al., 2021).

A bank contains the features of labelled images. An image's k most similar entries vote for their class with weight
exp(similarity / temperature). Features are the classifier's input, timm's forward_head(…, pre_logits=True).

    banks = compute_banks(model, batches, settings)               # one for each setting, as many at a time as fit
    bank = read_bank("features.safetensors", [model], classes)    # a file of `spot embed`, mapped into memory
    rows = knn_rows(evaluate(model, data, settings, features=True), banks)

A bank is compared in chunks, so that a file of 1.28 million × 768 numbers need not fit into memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spot.data.loader import Loader
from spot.errors import InputError
from spot.evaluation.accuracy import Evaluation, Setting, evaluate, model_of, with_models
from spot.hashes import hash_model
from spot.models.family import Source
from spot.models.spot_vit import SpotViT
from spot.placement.files import Placements
from spot.store import refuse_difference

K, TEMPERATURE = 20, 0.07
CHUNK = 65_536  # entries of the bank at a time: 200 MB of features at D = 768
ROWS = 256  # images at a time: 64 MB of similarities to a chunk
MEMORY = 8e9  # bytes of the banks that are computed at a time


class Bank(NamedTuple):
    """Features of labelled images."""

    features: Tensor  # (M, D)
    labels: Tensor  # (M,) int64


def compute_banks(
    source: Source, batches: Loader, settings: Sequence[Setting], *, memory: float = MEMORY, **options: Any
) -> Iterator[Bank]:
    """Yield a bank for each setting, computed by all processes together.

    A pass over the labelled images computes as many banks as fit into `memory` bytes, and the next pass begins when
    they have been used.

    options: arguments of `evaluate`, such as saliency.
    """
    if any(isinstance(setting.placement, Placements) for setting in settings):
        raise InputError("placements are for the images evaluated, not for the bank's; give a file of spot embed")
    bound = with_models(source, settings)
    size = 4 * len(batches.data) * model_of(bound[0]).spot_vit.embed_dim
    at_once = max(1, int(min(memory / max(1, size), len(bound))))
    for start in range(0, len(bound), at_once):
        group = bound[start : start + at_once]
        made = evaluate(source, batches, group, features=True, accuracy=False, title="bank", **options)
        if bool((made.labels < 0).any()):
            raise InputError("a kNN bank needs labels: a folder with one sub-folder per class")
        while made.features:
            yield Bank(made.features.pop(0), made.labels)


def read_bank(path: str | Path, models: Sequence[SpotViT], classes: Sequence[str]) -> Bank:
    """Read a bank from a file of `spot embed`; refuses features of another model or of images of other classes."""
    made = Placements.load(path)
    if not {"features", "labels"} <= set(made.values):
        raise InputError(f"{path} has no features and labels; write them with spot embed")
    for model in models:
        here = {"tokens": model.tokens, "model_hash": hash_model(model)}  # a family's weights depend on the tokens
        if made.metadata.get("model_hash") != here["model_hash"]:
            there = {name: made.metadata.get(name) for name in here}
            refuse_difference(str(path), there, here, "embed the images with this model")
    features, labels = made.values["features"], made.values["labels"]
    if int(labels.min()) < 0:
        raise InputError(f"{path} has images without labels; embed a folder with one sub-folder per class")
    if made.metadata.get("classes", list(classes)) != list(classes):
        raise InputError(f"{path} has images of other classes than the ones evaluated; embed images of these classes")
    return Bank(features, labels)


def check_k(bank: Bank, k: int) -> None:
    """Raise InputError for an invalid number of neighbours."""
    count = len(bank.labels)
    if not 1 <= k <= count:
        raise InputError(f"the bank holds {count} images, so k is from 1 to {count}, got {k}")


def classify(features: Tensor, bank: Bank, *, k: int = K, chunk: int = CHUNK) -> Tensor:
    """Predict classes by vote, best first: features (Q, D) → (Q, up to 5) int64."""
    check_k(bank, k)
    if features.shape[1] != bank.features.shape[1]:
        raise InputError(f"the bank has features of width {bank.features.shape[1]}, got {tuple(features.shape)}")
    classes = int(bank.labels.max()) + 1
    answers = []
    for similarity, labels in nearest(features, bank, k, chunk):
        weight = ((similarity - similarity[:, :1]) / TEMPERATURE).exp()  # only ratios of votes matter
        votes = weight.new_zeros(len(weight), classes).scatter_add(1, labels, weight)
        answers.append(votes.topk(min(5, classes)).indices)
    return torch.cat(answers)


def nearest(features: Tensor, bank: Bank, k: int, chunk: int = CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield similarities and labels (Q, k) of the bank entries most similar to features (Q, D), ROWS at a time."""
    queries = F.normalize(features, dim=1).split(ROWS)
    best = [(rows[:, :0], rows[:, :0].long()) for rows in queries]
    chunks = zip(bank.features.split(chunk), bank.labels.split(chunk), strict=True)
    for entries, labels in chunks:  # outer loop, to read each chunk from the disk once
        entries = F.normalize(entries.to(features), dim=1).T
        for index, rows in enumerate(queries):
            similarity, places = (rows @ entries).topk(min(k, entries.shape[1]))
            similarity = torch.cat([best[index][0], similarity], 1)
            candidates = torch.cat([best[index][1], labels.to(places.device)[places]], 1)
            similarity, places = similarity.topk(min(k, similarity.shape[1]))
            best[index] = similarity, candidates.gather(1, places)
    yield from best


def knn_rows(
    evaluation: Evaluation, banks: Iterable[Bank], *, k: int = K, device: torch.device | str = "cpu"
) -> list[dict[str, Any]]:
    """kNN accuracy in percent for each row of `evaluation.rows()`: mean and standard deviation over seeds.

    banks: one for each setting. device: the device for similarities.
    """
    right = []
    for features, bank in zip(evaluation.features, banks, strict=True):
        answers = classify(features.to(device), bank, k=k).cpu() == evaluation.labels[:, None]
        right.append(torch.stack([answers[:, 0], answers.any(1)]).double().mean(1) * 100)
    table = []
    for members in evaluation.groups():
        top1, top5 = torch.stack([right[index] for index in members], 1)
        std = top1.std().item() if len(members) > 1 else None
        table.append({"knn": top1.mean().item(), "knn_std": std, "knn_top5": top5.mean().item()})
    return table
