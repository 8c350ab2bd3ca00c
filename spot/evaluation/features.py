"""Pooled features of a data set in one file, resumable, by one process or many.

A feature depends on the image, its key and the settings alone. The file is a placements file
(spot/placement/files.py): beside the positions at which the model looked it has

    values.features   float32 (M, D), what enters the classifier
    values.labels     int64 (M,), -1 where the data has none
    metadata          model, model_hash, tokens, prior, scale, seed
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spot.errors import InputError
from spot.evaluation.accuracy import head_of
from spot.hashes import hash_model
from spot.models.wrappers import TokenModel
from spot.placement.dataset_search import KeyedImages, made_by_image
from spot.placement.files import Placements
from spot.placement.oracle import frozen
from spot.placement.priors import AnyPrior, resolve_prior
from spot.store import as_json


class Embedded(NamedTuple):
    """Features (M, D) of M images, their names and labels (M,), and what made them."""

    features: Tensor
    keys: list[str]
    labels: Tensor
    about: Mapping[str, Any]


def read_features(path: str | Path) -> Embedded:
    """What `embed` wrote."""
    return _embedded(Placements.load(path, "a file of features, as spot embed writes it"), path)


def _embedded(made: Placements, path: str | Path) -> Embedded:
    if {"features", "labels"} - made.values.keys():
        raise InputError(f"{path} is not a file of features: it has placements only; make it with spot embed")
    return Embedded(made.values["features"], list(made.keys), made.values["labels"], made.metadata)


def embed(
    model: TokenModel,
    data: KeyedImages,
    path: str | Path,
    *,
    tokens: int | None = None,
    prior: AnyPrior | None = None,
    seed: int = 0,
    **how: Any,
) -> Embedded:
    """Write the pooled features of every readable image of a data set to a safetensors file.

    Args:
        model: on the device to use; what enters its classifier is kept.
        tokens, prior: where tokens go; by default the model's own.
        seed: of priors that draw, together with each image's key.
        how: batch_size, workers, state and shown, as `spot.placement.dataset_search.search_dataset` has them.
    """
    inner, count = model.spot_vit, model.tokens if tokens is None else tokens
    chosen = resolve_prior(inner.prior if prior is None else prior).name
    about = {"model": inner.name, "model_hash": hash_model(inner), "prior": chosen, "tokens": count}
    about = as_json({**about, "scale": inner.scale, "seed": seed})

    @torch.no_grad()
    def make(images: Tensor, labels: Tensor, keys: list[str]) -> Placements:
        positions = model.place(images, keys=keys, tokens=count, prior=prior, seed=seed)
        pooled = head_of(model, images, positions)(pre_logits=True).float().cpu()
        return Placements(keys, positions, about, {"features": pooled, "labels": labels})

    with frozen(model):
        return _embedded(made_by_image(make, model, data, path, about, title="embedding", **how).placements, path)
