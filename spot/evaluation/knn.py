"""Evaluation of features without a classifier: weighted k nearest neighbours as in DINO (Caron et al., 2021).

A bank contains the features of labelled images, normalised to length 1. An image's k most similar
entries vote for their class with weight exp(similarity / temperature). Features are the classifier's
input, timm's forward_head(…, pre_logits=True).

One process compares the bank in chunks, and its file is mapped into memory: 1.28 million × 768
numbers need not fit. A bank file is safetensors:

    features   float32 (M, D), each of length 1
    labels     int64 (M,)
    header     under "spot-knn-bank", JSON with "version" and "about" (weights, placement, tokens, seed, data, classes)
"""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from spot import report
from spot.data.images import Data
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.accuracy import Evaluation, Maps, Setting, evaluate, with_models
from spot.evaluation.cache import determinants, entry_path, hash_images, spot_version
from spot.hashes import hash_model
from spot.models.spot_vit import SpotViT
from spot.placement.files import Placements
from spot.processes import this_process
from spot.store import read_tensors, refuse_difference, write_tensors

FORMAT, VERSION = "spot-knn-bank", 2
K, TEMPERATURE = 20, 0.07
MOST_CLASSES = 1_000_000  # bounds the memory of the votes if a file is damaged
CHUNK = 65_536  # entries of the bank at a time: 200 MB of features at D = 768
ROWS = 256  # images at a time: 64 MB of similarities to a chunk


@dataclass(frozen=True)
class Bank:
    """Features (M, D) of labelled images, each of length 1, and labels (M,)."""

    features: Tensor
    labels: Tensor
    about: Mapping[str, Any] = field(default_factory=dict)

    def refuse_other(self, what: str, width: int, **about: Any) -> None:
        """Raise InputError for features that are not comparable to this bank, naming the difference."""
        if width != self.features.shape[1]:
            raise InputError(f"{what} has features of width {self.features.shape[1]}, the model of width {width}")
        there = {name: self.about[name] for name in about if name in self.about}
        refuse_difference(what, there, {name: about[name] for name in there}, "build it again with this model")

    def refuse_vote(self, k: int, temperature: float = TEMPERATURE) -> None:
        """Raise InputError for an invalid k or temperature."""
        count = len(self.features)
        if not 1 <= k <= count:
            raise InputError(f"the bank holds {count} images, so k is from 1 to {count}, got {k}")
        if not temperature > 0:
            raise InputError(f"the temperature of the vote must be above 0, got {temperature}")

    def save(self, path: str | Path) -> None:
        """Write the file atomically."""
        tensors = {"features": self.features, "labels": self.labels}
        write_tensors(path, tensors, FORMAT, {"version": VERSION, "about": dict(self.about)})

    @classmethod
    def load(cls, path: str | Path) -> "Bank":
        """Open a bank's file. Its tensors are mapped into memory, and read when they are used."""
        tensors, header = read_tensors(path, FORMAT, "a kNN bank")
        if header.get("version") != VERSION:
            raise InputError(f"{path} is a kNN bank of version {header.get('version')}, not {VERSION}; build it again")
        try:
            bank = cls(tensors["features"], tensors["labels"], dict(header["about"]))
            count, _ = bank.features.shape
            if not (bank.labels.shape == (count,) and bank.labels.dtype == torch.int64 and count):
                raise InputError(f"{tuple(bank.labels.shape)} labels for features of {tuple(bank.features.shape)}")
            if not 0 <= int(bank.labels.min()) <= int(bank.labels.max()) < MOST_CLASSES:
                raise InputError(f"labels are not between 0 and {MOST_CLASSES - 1}")
            return bank
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is a damaged kNN bank: its content makes no sense ({error})") from error


def classify(
    features: Tensor, bank: Bank, *, k: int = K, temperature: float = TEMPERATURE, chunk: int = CHUNK
) -> Tensor:
    """Predict classes by vote, best first: features (Q, D) → (Q, up to 5) int64."""
    bank.refuse_vote(k, temperature)
    if features.shape[1] != bank.features.shape[1]:
        raise InputError(f"the bank has features of width {bank.features.shape[1]}, got {tuple(features.shape)}")
    classes = int(bank.labels.max()) + 1
    answers = []
    for similarity, labels in nearest(features, bank, k, chunk):
        # Only ratios of votes matter. Subtracting the largest similarity prevents overflow at any temperature.
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = weight.new_zeros(len(weight), classes).scatter_add(1, labels, weight)
        answers.append(votes.topk(min(5, classes)).indices)
    return torch.cat(answers)


def nearest(features: Tensor, bank: Bank, k: int, chunk: int = CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield similarities and labels (Q, k) of the bank entries most similar to features (Q, D), ROWS at a time."""
    queries = F.normalize(features, dim=1).split(ROWS)
    best = [(rows[:, :0], rows[:, :0].long()) for rows in queries]
    chunks = zip(bank.features.split(chunk), bank.labels.split(chunk), strict=True)
    for entries, labels in chunks:  # outer loop, to read each chunk from the disk once
        entries = entries.to(features).T
        for index, rows in enumerate(queries):
            similarity, places = (rows @ entries).topk(min(k, entries.shape[1]))
            similarity = torch.cat([best[index][0], similarity], 1)
            known = torch.cat([best[index][1], labels.to(places.device)[places]], 1)
            similarity, places = similarity.topk(min(k, similarity.shape[1]))
            best[index] = similarity, known.gather(1, places)
    yield from best


def knn_rows(
    evaluation: Evaluation,
    banks: Sequence[Bank],
    *,
    k: int = K,
    temperature: float = TEMPERATURE,
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """kNN accuracy in percent for each row of `evaluation.rows()`: mean and standard deviation over seeds.

    banks: one for each setting. device: the device for similarities.
    """
    right = []
    for features, bank in zip(evaluation.features, banks, strict=True):
        answers = classify(features.to(device), bank, k=k, temperature=temperature).cpu() == evaluation.labels[:, None]
        right.append(torch.stack([answers[:, 0], answers.any(1)]).double().mean(1) * 100)
    table = []
    for members in evaluation.groups():
        top1, top5 = torch.stack([right[index] for index in members], 1)
        std = top1.std().item() if len(members) > 1 else None
        table.append({"knn": top1.mean().item(), "knn_std": std, "knn_top5": top5.mean().item()})
    return table


def build_banks(
    model: SpotViT,
    data: Data,
    settings: Sequence[Setting],
    cache: str | Path,
    *,
    batch_size: int = 64,
    workers: int = 0,
    saliency: Maps | None = None,
    maps: str = "",
    memory: float = 8e9,
    shown: bool = True,
) -> list[Bank]:
    """A bank for each setting, read from the folder `cache` or built and saved there.

    A cached bank is reused only for the same weights, placement, image files and maps (`hash_maps`).
    Images are decoded once per group of settings whose features fit into `memory` bytes.
    """
    settings = with_models(model, settings)
    for setting in settings:
        if isinstance(setting.placement, Placements):
            raise InputError("placements are for the images evaluated, not for the bank's; give a bank file")
    state = this_process()
    images, classes = hash_images(data), list(data.classes)
    weights = {each: hash_model(each) for each in {setting.bound.spot_vit for setting in settings}}
    abouts = [determinants(each, weights[each.bound.spot_vit], images, maps) for each in settings]
    abouts = [{**about, "kind": "banks", "classes": classes, "spot": spot_version()} for about in abouts]
    paths = [entry_path(cache, about) for about in abouts]
    banks = [_kept(path) for path in paths]
    state.wait_for_everyone()  # all processes must check the cache before the first one writes to it
    missing = [index for index, bank in enumerate(banks) if bank is None]
    at_once = max(1, int(memory / (4 * len(cast(Sized, data)) * model.embed_dim)))
    for start in range(0, len(missing), at_once):
        chosen = missing[start : start + at_once]
        batches = loader(data, batch_size, workers, process=state.process_index, processes=state.num_processes)
        some = [settings[index] for index in chosen]
        made = evaluate(
            model, batches, some, saliency=saliency, features=True, accuracy=False, shown=shown, title="bank"
        )
        if bool((made.labels < 0).any()):
            raise InputError("a kNN bank needs labels: a folder with one sub-folder per class")
        for features, index in zip(made.features, chosen, strict=True):
            if state.is_main_process:
                Bank(F.normalize(features, dim=1), made.labels, abouts[index]).save(paths[index])
        state.wait_for_everyone()
    return [bank or Bank.load(path) for bank, path in zip(banks, paths, strict=True)]


def _kept(path: Path) -> Bank | None:
    """Load the bank of a file; None if it is missing or damaged."""
    try:
        return Bank.load(path) if path.is_file() else None
    except InputError as error:
        report.warn(f"{error}; it is made again")
        return None
