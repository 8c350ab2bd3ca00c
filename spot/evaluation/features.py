"""Pooled features of a data set in one file. Runs are resumable and can use several processes.

A feature depends only on the image, its key and the settings. The file is a placements file, read by
`spot.Placements.load`. Besides the positions it contains

    values["features"]   float32 (M, D), the classifier's input
    values["labels"]     int64 (M,), -1 for images without a label
    metadata             model, model_hash, tokens, prior, scale, seed, classes; policy (a hash) if there is one

`spot evaluate --knn FILE` reads it as a bank (spot/evaluation/knn.py).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot.data.images import Data
from spot.evaluation.accuracy import features_and_head
from spot.models.spot_vit import SpotViT
from spot.placement.dataset_search import describe_placement, fill_placements
from spot.placement.files import Placements
from spot.placement.oracle import frozen
from spot.store import as_json


def embed(model: SpotViT, data: Data, path: str | Path, *, seed: int = 0, **options: Any) -> Placements:
    """Write the pooled features of every readable image of a data set to a safetensors file.

    Args:
        model: places the tokens by its own prior and budget; `model.at` selects others.
        seed: seed of random priors, combined with each image's key.
        options: batch_size and workers, as for `spot.placement.dataset_search.search_dataset`.
    """
    others = {"scale": model.scale, "seed": seed, "classes": list(data.classes)}
    about = as_json(describe_placement(model) | others)

    @torch.no_grad()
    def make(images: Tensor, labels: Tensor, keys: list[str]) -> Placements:
        positions = model.place(images, keys=keys, seed=seed)
        tokens, head = features_and_head(model, images, positions)
        pooled = head(tokens, pre_logits=True).float().cpu()
        return Placements(keys, positions, about, {"features": pooled, "labels": labels})

    with frozen(model):
        return fill_placements(make, model, data, path, about, title="embedding", **options).placements
