"""`spot evaluate`: the accuracy of a model's placements, budgets and baselines on one data set.

compared = compare(spot.load("scenes-a"), "scenes", prior=("isotropic", "center"), tokens=(9, 16), limit=320)
compared.rows            # a row per placement and budget, percentages with 95 % intervals
compared.evaluation      # the results of each image
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from spot.data.difficulty import difficulty_of
from spot.data.images import Data, Images, data_for, open_data
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.accuracy import Evaluation, Maps, Setting, evaluate, with_models
from spot.evaluation.cache import hash_maps
from spot.evaluation.cost import macs
from spot.evaluation.early_exit import measure
from spot.evaluation.knn import Bank, build_banks, knn_rows
from spot.hashes import hash_model
from spot.models.baselines import BASELINES
from spot.models.cascade import Cascade
from spot.models.family import Source, at_budget
from spot.models.glimpsed import Glimpsed
from spot.models.loading import read_prior
from spot.models.spot_vit import SpotViT
from spot.options import EvaluateOptions
from spot.placement.files import Placements
from spot.placement.priors import AnyPrior
from spot.placement.saliency import map_macs, maps_for
from spot.processes import this_process

BANK_IMAGES = 50_000  # number of scenes in a kNN bank, out of a million


@dataclass(frozen=True)
class Comparison:
    """Results: a row for each placement and budget, and the results of each image."""

    rows: list[dict[str, Any]]
    evaluation: Evaluation
    classified: bool  # whether the data's classes are the model's; if not, only kNN accuracy is measured

    def table(self) -> list[dict[str, Any]]:
        """The rows for display, in percent, without empty columns."""
        lines = []
        for row in self.rows:
            line: dict[str, Any] = {"placement": row["placement"], "tokens": row["tokens"], "GMACs": row["gmacs"]}
            if self.classified:
                line |= {"top-1 %": row["top1"], "95 % interval": f"{row['low']:.1f}–{row['high']:.1f}"}
                line |= {"top-5 %": row.get("top5"), "loss": row.get("loss")}
            lines.append(line | {"±": row.get("std"), "kNN %": row.get("knn"), "kNN ±": row.get("knn_std")})
        empty = {name for name in lines[0] if all(line[name] is None for line in lines)}
        return [{name: value for name, value in line.items() if name not in empty} for line in lines]

    def summary(self) -> str:
        """A caption: the number of images, the time spent waiting for data, and skipped images."""
        made = self.evaluation
        share = made.waited / max(made.seconds, 1e-9)
        text = (
            f"{len(made.keys)} images in {made.seconds:.1f} s, {made.waited:.1f} s of it ({share:.0%}) waiting for data"
        )
        if share > 0.3:
            text += "; more workers may help"
        if made.skipped:
            text += f". {len(made.skipped)} could not be read and are not counted, the first {made.skipped[0]}"
        if not self.classified:
            text += ". The model has no classifier for these classes, so only neighbours vote"
        return text + "."

    def predictions(self) -> list[dict[str, Any]]:
        """A row for each image: its key, its label, and the prediction of each setting."""
        made = self.evaluation
        names = [f"{each.label} {each.budget} seed {each.seed}" for each in made.settings]
        return [
            {"key": key, "label": label, **dict(zip(names, classes, strict=True))}
            for key, label, classes in zip(made.keys, made.labels.tolist(), made.predictions.T.tolist(), strict=True)
        ]


def compare(source: Source, data: str | Path, cascade: Cascade | None = None, **options: Any) -> Comparison:
    """Evaluate every prior, baseline and budget in one pass over the images, in all processes together.

    Args:
        source: a model, or a family, which has weights for each budget.
        cascade: early exit to evaluate too.
        options: fields of `spot.options.EvaluateOptions`.
    """
    asked, state = EvaluateOptions(**options), this_process()
    model = at_budget(source).to(state.device)  # for anything independent of the budget
    priors = [read_prior(each, source) or each for each in asked.prior]
    maps = maps_for(model, priors or (model.prior,), asked.saliency, data)
    settings = chosen_settings(source, model, priors, asked)
    for each in settings:
        each.bound.to(state.device)
    if cascade is not None and state.num_processes > 1:
        raise InputError("a cascade is measured by one process; leave out early exit, or start one")
    images, classified = open_labelled(model, data, need_classes=asked.knn is None, **asked.opening())
    shape, reading = None, asked.readers()
    if model.fit == "full" and isinstance(images, Images):  # pictures of any size, one at a time
        shape, reading = tuple(some[0].shape) if (some := images[0]) else None, {**reading, "batch_size": 1}
    batches = loader(images, **reading, process=state.process_index, processes=state.num_processes)
    banks: list[Bank] = []
    if asked.knn is not None:
        bank_maps = maps_for(model, priors or (model.prior,), asked.saliency, asked.knn)
        banks = banks_of(model, images, classified, settings, asked, bank_maps)
        weights, classes = hash_model(settings[0].bound.spot_vit), list(images.classes)
        banks[0].refuse_other(str(asked.knn), model.embed_dim, weights=weights, classes=classes)
        banks[0].refuse_vote(asked.k)
    made = evaluate(
        model, batches, settings, saliency=maps, features=bool(banks), accuracy=classified, shown=state.is_main_process
    )
    vote: dict[str, Any] = {"k": asked.k, "device": state.device}
    votes = knn_rows(made, banks, **vote) if banks else repeat({})
    rows = []
    for members, row, voted in zip(made.groups(), made.rows(), votes, strict=False):
        about = {"placement": row["placement"], "tokens": row["tokens"]}
        first = made.settings[members[0]]
        saliency_cost = (map_macs(asked.saliency or "spectral") or 0) if first.needs_map else 0
        cost = (macs(first.module, shape) + saliency_cost) / 1e9
        row = row if classified else {name: row[name] for name in ("seeds", "images")}
        rows.append({**about, "gmacs": cost, **row, **voted})
    if cascade is not None:
        rows.append(measure(cascade.to(state.device), batches))
    return Comparison(rows, made, classified)


def chosen_settings(
    source: Source, model: SpotViT, priors: Sequence[AnyPrior], asked: EvaluateOptions
) -> list[Setting]:
    """One setting for each prior, baseline, budget and seed; by default the model's prior and budget."""
    if asked.seeds < 1:
        raise InputError(f"at least one seed is needed, got {asked.seeds}")
    chosen: list[Setting] = []
    own = () if asked.baseline or asked.placements else (model.prior,)
    for name in (*asked.baseline, *(priors or own)):
        dense = isinstance(name, str) and name in BASELINES and BASELINES[name].dense
        chosen += [Setting(name, budget) for budget in ((None,) if dense else asked.tokens or (model.tokens,))]
    stems = [path.stem for path in asked.placements]
    names = [str(path) if stems.count(path.stem) > 1 else path.stem for path in asked.placements]
    chosen += [Setting(Placements.load(path), name=name) for path, name in zip(asked.placements, names, strict=True)]
    others = asked.prior or asked.baseline or asked.placements
    if asked.glimpses or (model.fit == "full" and not others):
        several = [Glimpsed(model, count) for count in asked.glimpses or (None,)]
        chosen = chosen if others else []
        chosen += [Setting(model=each, name=f"glimpses: {each.glimpses}") for each in several]
    settings = with_models(source, chosen)
    return [replace(each, seed=seed) for each in settings for seed in range(asked.seeds if each.random else 1)]


def open_labelled(model: SpotViT, data: str | Path, *, need_classes: bool, **opening: Any) -> tuple[Data, bool]:
    """The images, and whether their labels are the model's classes. kNN also works with other classes."""
    if model.num_classes == 0 and need_classes:
        raise InputError(f"{model.name} has no classifier; its features can be measured with knn=FOLDER (--knn FOLDER)")
    try:
        return data_for(model, data, **opening), model.num_classes > 0
    except InputError:
        if need_classes:
            raise
    return open_data(data, transform=model.transform(), **opening), False


def banks_of(
    model: SpotViT,
    images: Data,
    classified: bool,
    settings: Sequence[Setting],
    asked: EvaluateOptions,
    maps: Maps | None,
) -> list[Bank]:
    """A kNN bank for each setting: one bank file for all, or one built per setting from images with the same labels."""
    source = Path(str(asked.knn))
    if source.suffix == ".safetensors":
        return [Bank.load(source)] * len(settings)
    opening: dict[str, Any] = {"split": "train", "skip": asked.opening()["skip"]}
    if classified:
        labelled = data_for(model, source, limit=BANK_IMAGES if difficulty_of(source) else None, **opening)
    else:
        labelled = open_data(source, transform=model.transform(), classes=images.classes, **opening)
    folder = asked.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spot" / "knn"
    made_by = "" if maps is None else hash_maps(asked.saliency or "spectral")
    loading: dict[str, Any] = {**asked.readers(), "saliency": maps, "maps": made_by}
    return build_banks(model, labelled, settings, folder, shown=this_process().is_main_process, **loading)
