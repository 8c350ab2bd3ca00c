"""Resumable oracle search on a data set, written to a placements file.

An image's placement depends on its key, the seed and the settings, not on its batch. Under torchrun, processes share
the batches. Each batch is written as soon as it is done, and a resumed run writes the same file.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spot import report
from spot.data.images import Data
from spot.data.loader import Loader
from spot.errors import InputError
from spot.hashes import hash_model, hash_tensors
from spot.placement.files import Placements, PlacementWriter
from spot.placement.oracle import SearchSettings, search
from spot.placement.priors import resolve_prior
from spot.placement.saliency import resolve_saliency
from spot.processes import this_process
from spot.store import as_json, locked


class Searched(NamedTuple):
    """The placements of a data set, and how many images and seconds this run took."""

    placements: Placements
    images: int
    seconds: float


def search_dataset(
    model: Any,
    data: Data,
    path: str | Path,
    *,
    saliency: Callable[[Tensor, Sequence[str]], Tensor] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    workers: int = 0,
    keep: str = "trajectories",
    settings: SearchSettings | None = None,
    **changes: Any,
) -> Searched:
    """Search all images of a data set that are not yet in the placements file.

    Args:
        model: places the initial tokens by its own prior, budget and scale; `model.at` selects others. Scales other
            than 1 are optimised too.
        data: `data[i]` is (image (C, H, W), label or -1, key), and `data.keys` has all keys.
        path: the .safetensors file. Shards are kept next to it until all images are done.
        saliency: maps (B, H, W) for images and keys, if the prior needs them. Default: the model's own.
        seed: for random priors and wrong labels; combined with each image's key.
        batch_size: images searched together; changes results by rounding only.
        keep: "trajectories" or only the final "positions".
        settings, changes: as for `search`.
    """
    from spot import __version__

    if keep not in ("trajectories", "positions"):
        raise InputError(f"keep is 'trajectories' or 'positions', got {keep!r}")
    settings = (settings or SearchSettings()).changed(**changes)
    objective = settings.objective
    prior = resolve_prior(model.prior)
    if not prior.needs_map:
        saliency = None
    elif saliency is None:
        saliency = resolve_saliency(model.saliency, model)
    about = as_json(
        {
            "spot": __version__,
            **describe_placement(model),
            "saliency": None if saliency is None else _name(saliency),
            "seed": seed,
            "objective": _name(objective),
            "keep": keep,
            "settings": settings.as_json(),
        }
    )

    def make(images: Tensor, labels: Tensor, keys: list[str]) -> Placements:
        maps = None if saliency is None else saliency(images, keys)
        start = model.place(images, keys=keys, seed=seed, maps=maps)
        if settings.labelled and bool((labels < 0).any()):
            missing = keys[int((labels < 0).nonzero()[0])]
            raise InputError(f"objective {objective!r} needs labels, but {missing} has none; use 'agree' or 'entropy'")
        targets = labels if settings.labelled or callable(objective) else None
        result = search(model, images, targets, start, settings, keys=keys, seed=seed)
        chances = result.logits.softmax(-1).cpu()  # (B, steps + 1, classes)
        known = (labels >= 0) & (labels < chances.shape[2])
        probabilities = chances[torch.arange(len(labels)), :, labels.where(known, 0)]
        values = {
            "labels": labels,
            "losses": result.losses.cpu(),
            "predictions": result.logits.argmax(-1).cpu(),
            "probabilities": probabilities.where(known[:, None], torch.nan),  # of the label
        }
        if objective == "obfuscate" and result.target is not None:
            values["targets"] = result.target.cpu()
        kept = result.trajectory if keep == "trajectories" else result.positions
        return Placements(keys, kept.cpu(), about, values)

    return fill_placements(make, model, data, path, about, "searching", batch_size, workers)


def describe_placement(model: Any) -> dict[str, Any]:
    """The model's name, weights, budget, prior and policy, which a resumed run must have too."""
    prior = resolve_prior(model.prior)
    about = {"model": _name(model), "model_hash": hash_model(model), "tokens": model.tokens, "prior": prior.name}
    if prior.learned:
        model.resolved_prior()  # refuses a model without a policy
        about["policy"] = hash_tensors(model.policy.state_dict())
    return about


def fill_placements(
    make: Callable[[Tensor, Tensor, list[str]], Placements],
    model: Any,
    data: Data,
    path: str | Path,
    about: dict[str, Any],
    title: str,
    batch_size: int = 32,
    workers: int = 0,
) -> Searched:
    """Fill a placements file with `make(images, labels, keys)` for every image that is not yet in it."""
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1 image, got {batch_size}")
    state = this_process()
    first = state.process_index == 0
    with locked(path) if first else nullcontext():
        writer = PlacementWriter(path, about)
        keys = data.keys
        chunks = [range(len(keys))[start : start + batch_size] for start in range(0, len(keys), batch_size)]
        todo = [[index for index in chunk if keys[index] not in writer.done] for chunk in chunks]
        todo = [chunk for chunk in todo[state.process_index :: state.num_processes] if chunk]
        batches, device = Loader(data, todo, workers), next(model.parameters()).device
        before, began = set(writer.done), time.perf_counter()
        with report.progress(shown=first) as bar:
            task = bar.add_task(title, total=batches.samples)
            for batch in batches:
                writer.append(make(batch.images.to(device), batch.labels, batch.keys))
                bar.advance(task, len(batch.keys))
        seconds = time.perf_counter() - began
        state.wait_for_everyone()
        kept = writer.finish(keys) if first else None
        state.wait_for_everyone()
        kept = Placements.load(path) if kept is None else kept
        placements = kept.select(key for key in keys if key in kept)
        return Searched(placements, sum(key not in before for key in placements.keys), seconds)


def _name(thing: Any) -> str:
    """The name of a prior, saliency, objective or model as written to files."""
    if isinstance(thing, str):
        return thing
    return str(getattr(thing, "name", None) or getattr(thing, "__qualname__", type(thing).__name__))
