"""Pooled features of a data set in one file, resumable, by one process or many.

A feature depends on the image, its key and the settings alone. Images are embedded in fixed shards, each
kept beside the file as soon as it is done; a run that was killed and started again writes the same file
as one that was not. The file is safetensors:

    features   float32 (M, D), what enters the classifier
    labels     int64 (M,), -1 where the data has none
    keys       uint8, the images' names in UTF-8, separated by zero bytes
    header     under "spot-features", JSON: version, model, model_hash, tokens, prior, scale, seed
"""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from spot import report
from spot.errors import InputError
from spot.hashes import hash_json, hash_model
from spot.models.protocol import TokenModel
from spot.placement.dataset_search import Batches, KeyedImages
from spot.placement.priors import AnyPrior, resolve_prior
from spot.store import as_json, decode_names, encode_names, locked, read_tensors, refuse_difference, write_tensors

KIND, VERSION = "spot-features", 1
SHARD = 1024  # images


class Embedded(NamedTuple):
    """Features (M, D) of M images, their names and labels (M,), and what made them."""

    features: Tensor
    keys: list[str]
    labels: Tensor
    about: dict[str, Any]


def read_features(path: str | Path) -> Embedded:
    """What `embed` wrote."""
    tensors, about = read_tensors(path, KIND, "a file of features")
    if about.get("version") != VERSION or {"features", "labels", "keys"} - set(tensors):
        raise InputError(f"{path} is not a file of features of version {VERSION}; make it again with spot embed")
    keys = decode_names(tensors["keys"]) if len(tensors["features"]) else []
    return Embedded(tensors["features"], keys, tensors["labels"], about)


def embed(
    model: TokenModel,
    data: KeyedImages,
    path: str | Path,
    *,
    tokens: int | None = None,
    prior: AnyPrior | None = None,
    seed: int = 0,
    batch_size: int = 64,
    shard: int = SHARD,
    workers: int = 0,
    state: Any = None,
    shown: bool = True,
) -> Embedded | None:
    """Write the pooled features of every readable image of a data set to a safetensors file.

    Args:
        model: on the device to use; what enters its classifier is kept.
        tokens, prior: where tokens go; by default the model's own.
        seed: of priors that draw, together with each image's key.
        shard: images to a part, which is what a killed run loses at most.
        state: an `accelerate.PartialState`, to share the work among its processes. The first returns the features.
    """
    if batch_size < 1 or shard < 1:
        raise InputError(f"batches and shards have at least one image, got {batch_size} and {shard}")
    keys, parts = data.keys, Path(f"{path}.parts")
    if not len(keys):
        raise InputError("there are no images to embed")
    process, processes = (state.process_index, state.num_processes) if state else (0, 1)
    about = describe(model, tokens, prior, seed)
    starts = range(0, len(keys), shard)
    with locked(path) if process == 0 else nullcontext():
        with report.progress(shown=shown and process == 0) as bar:
            task = bar.add_task("embedding", total=len(starts[process::processes]))
            for start in starts[process::processes]:
                chosen = range(len(keys))[start : start + shard]
                names = hash_json([keys[index] for index in chosen])
                part = parts / f"{start:08d}-{names}.safetensors"
                if not finished(part, about):
                    write_shard(model, data, part, chosen, about, prior, batch_size, workers)
                bar.advance(task)
        if state:
            state.wait_for_everyone()
        merged = None
        if process == 0:
            merged = merge(sorted(parts.glob("*.safetensors")), about)
            write(path, merged)
            shutil.rmtree(parts)
        if state:
            state.wait_for_everyone()
    return merged


def describe(model: TokenModel, tokens: int | None, prior: AnyPrior | None, seed: int) -> dict[str, Any]:
    """What determines the features, as JSON."""
    inner = model.spot_vit
    chosen = resolve_prior(inner.prior if prior is None else prior)
    about = {"version": VERSION, "model": inner.name, "model_hash": hash_model(inner), "prior": chosen.name}
    return as_json({**about, "tokens": model.tokens if tokens is None else tokens, "scale": inner.scale, "seed": seed})


def finished(part: Path, about: dict[str, Any]) -> bool:
    """Whether a shard is there already; one that was made under other settings is refused."""
    if not part.is_file():
        return False
    refuse_difference(f"{part.parent}", read_features(part).about, about, "remove it, or choose another output")
    return True


@torch.no_grad()
def write_shard(
    model: TokenModel,
    data: KeyedImages,
    part: Path,
    chosen: Sequence[int],
    about: dict[str, Any],
    prior: AnyPrior | None,
    batch_size: int,
    workers: int,
) -> None:
    """Embed some images and keep them; those that cannot be read are left out, if the data says so."""
    device = next(model.parameters()).device
    batches = [list(chosen[first : first + batch_size]) for first in range(0, len(chosen), batch_size)]
    loader: Any = DataLoader(Batches(data, batches), batch_size=None, num_workers=workers)
    features, labels, names = [torch.empty(0, 0)], [torch.empty(0, dtype=torch.int64)], []
    placing = {"tokens": about["tokens"], "prior": prior, "seed": about["seed"]}
    for batch in loader:
        if isinstance(batch, InputError):
            raise batch
        if batch is None:
            continue
        images, known, keys = batch
        images = images.to(device)
        positions = model.place(images, keys=keys, **placing)
        pooled = model.forward_head(model.forward_features(images, positions), pre_logits=True)
        features.append(pooled.float().cpu())
        labels.append(known)
        names += keys
    kept = torch.cat(features[1:]) if names else torch.empty(0, 0)
    write(part, Embedded(kept, names, torch.cat(labels), about))


def write(path: str | Path, embedded: Embedded) -> None:
    tensors = {"features": embedded.features, "labels": embedded.labels, "keys": encode_names(embedded.keys)}
    write_tensors(path, tensors, KIND, embedded.about)


def merge(parts: Sequence[Path], about: dict[str, Any]) -> Embedded:
    """The shards in order."""
    read = [part for part in map(read_features, parts) if part.keys]
    if not read:
        raise InputError("none of the images could be read; there are no features")
    keys = [key for part in read for key in part.keys]
    return Embedded(torch.cat([part.features for part in read]), keys, torch.cat([part.labels for part in read]), about)
