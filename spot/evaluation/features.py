"""Pooled features of a data set in one file. Runs are resumable and can use several processes.

A feature depends only on the image, its key and the settings. The file is a placements file, read by
`spot.Placements.load`. Besides the positions it contains

    values["features"]   float32 (M, D), the classifier's input
    values["labels"]     int64 (M,), -1 for images without a label
    metadata             model, model_hash, tokens, prior, scale, seed, classes

`spot evaluate --knn FILE` reads it as a bank (spot/evaluation/knn.py).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot.data.images import Data
from spot.evaluation.accuracy import head_of
from spot.hashes import hash_model
from spot.models.wrappers import TokenModel
from spot.placement.dataset_search import fill_placements
from spot.placement.files import Placements
from spot.placement.oracle import frozen
from spot.placement.priors import AnyPrior, resolve_prior
from spot.store import as_json


def embed(
    model: TokenModel,
    data: Data,
    path: str | Path,
    *,
    tokens: int | None = None,
    prior: AnyPrior | None = None,
    seed: int = 0,
    **how: Any,
) -> Placements:
    """Write the pooled features of every readable image of a data set to a safetensors file.

    Args:
        tokens, prior: the placement; by default the model's.
        seed: seed of random priors, combined with each image's key.
        how: batch_size and workers, as for `spot.placement.dataset_search.search_dataset`.
    """
    inner, count = model.spot_vit, model.tokens if tokens is None else tokens
    chosen = resolve_prior(inner.prior if prior is None else prior).name
    about = {"model": inner.name, "model_hash": hash_model(inner), "prior": chosen, "tokens": count}
    about = as_json({**about, "scale": inner.scale, "seed": seed, "classes": list(data.classes)})

    @torch.no_grad()
    def make(images: Tensor, labels: Tensor, keys: list[str]) -> Placements:
        positions = model.place(images, keys=keys, tokens=count, prior=prior, seed=seed)
        pooled = head_of(model, images, positions)(pre_logits=True).float().cpu()
        return Placements(keys, positions, about, {"features": pooled, "labels": labels})

    with frozen(model):
        return fill_placements(make, model, data, path, about, title="embedding", **how).placements
