"""`spot evaluate`: the accuracy of a model's placements, budgets and baselines on one data set.

compared = compare(spot.load("scenes-a"), "scenes", prior=("isotropic", "center"), tokens=(9, 16), limit=320)
compared.rows            # a row per placement and budget, percentages with 95 % intervals
compared.evaluation      # the results of each image
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from spot.data.difficulty import difficulty_of
from spot.data.images import Data, Images, data_for, open_data
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.accuracy import Evaluation, Setting, evaluate, model_of, with_models
from spot.evaluation.cost import macs
from spot.evaluation.early_exit import measure
from spot.evaluation.knn import Bank, check_k, compute_banks, knn_rows, read_bank
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
        names = [f"{each.name} {each.tokens} seed {each.seed}" for each in made.settings]
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
    chosen, state = EvaluateOptions(**options), this_process()
    if cascade is not None and state.num_processes > 1:
        raise InputError("a cascade is measured by one process; leave out early exit, or start one")
    model = at_budget(source).to(state.device)  # for anything independent of the budget
    priors = [read_prior(each, source) or each for each in chosen.prior]
    maps = maps_for(model, priors or [model.prior], chosen.saliency, data)
    settings = chosen_settings(source, model, priors, chosen)
    for setting in settings:
        model_of(setting).to(state.device)
    images, classified = open_labelled(model, data, need_classes=chosen.knn is None, **chosen.opening())
    reading = chosen.readers() | {"process": state.process_index, "processes": state.num_processes}
    shape = None  # of the image whose cost is counted, by default the model's input size
    if model.fit == "full" and isinstance(images, Images):  # pictures of any size, one at a time
        reading["batch_size"], first_image = 1, images[0]
        shape = None if first_image is None else tuple(first_image[0].shape)
    batches, shown = loader(images, **reading), state.is_main_process
    banks: Iterable[Bank] = ()
    if chosen.knn is not None and chosen.knn.suffix == ".safetensors":
        bank = read_bank(chosen.knn, [model_of(each).spot_vit for each in settings], images.classes)
        check_k(bank, chosen.k)
        banks = [bank] * len(settings)
    elif chosen.knn is not None:
        bank_maps = maps_for(model, priors or [model.prior], chosen.saliency, chosen.knn)
        labelled = open_bank(model, chosen.knn, None if classified else images.classes, chosen.skip_unreadable)
        computed = compute_banks(model, loader(labelled, **reading), settings, saliency=bank_maps, shown=shown)
        first_bank = next(computed)  # before the evaluation, to refuse bad input early
        check_k(first_bank, chosen.k)
        banks = chain([first_bank], computed)
    made = evaluate(model, batches, settings, saliency=maps, features=bool(banks), accuracy=classified, shown=shown)
    votes = knn_rows(made, banks, k=chosen.k, device=state.device) if banks else [{}] * len(settings)
    rows = []
    for members, row, vote in zip(made.groups(), made.rows(), votes, strict=False):
        first = made.settings[members[0]]
        saliency_cost = (map_macs(chosen.saliency or model.saliency) or 0) if first.needs_map else 0
        cost = (macs(model_of(first), shape) + saliency_cost) / 1e9
        measured = row if classified else {name: row[name] for name in ("seeds", "images")}
        rows.append({"placement": first.name, "tokens": first.tokens, "gmacs": cost, **measured, **vote})
    if cascade is not None:
        rows.append(measure(cascade.to(state.device), batches))
    return Comparison(rows, made, classified)


def chosen_settings(
    source: Source, model: SpotViT, priors: Sequence[AnyPrior], chosen: EvaluateOptions
) -> list[Setting]:
    """One setting for each prior, baseline, budget and seed; by default the model's prior and budget."""
    if chosen.seeds < 1:
        raise InputError(f"at least one seed is needed, got {chosen.seeds}")
    settings: list[Setting] = []
    if not (chosen.prior or chosen.baseline or chosen.placements):
        priors = () if chosen.glimpses or model.fit == "full" else (model.prior,)
    for name in (*chosen.baseline, *priors):
        dense = isinstance(name, str) and name in BASELINES and BASELINES[name].dense
        settings += [Setting(name, budget) for budget in ((None,) if dense else chosen.tokens or (model.tokens,))]
    stems = [path.stem for path in chosen.placements]
    names = [str(path) if stems.count(path.stem) > 1 else path.stem for path in chosen.placements]
    settings += [Setting(Placements.load(path), name=name) for path, name in zip(chosen.placements, names, strict=True)]
    if chosen.glimpses or not settings:
        several = [Glimpsed(model, count) for count in chosen.glimpses or (None,)]
        settings += [Setting(model=each, name=f"glimpses: {each.glimpses}") for each in several]
    settings = with_models(source, settings)
    return [replace(each, seed=seed) for each in settings for seed in range(chosen.seeds if each.random else 1)]


def open_labelled(model: SpotViT, data: str | Path, *, need_classes: bool, **opening: Any) -> tuple[Data, bool]:
    """The images, and whether their labels are the model's classes. kNN also works with other classes."""
    if model.num_classes == 0 and need_classes:
        raise InputError(f"{model.name} has no classifier; its features can be measured with knn=FOLDER (--knn FOLDER)")
    try:
        return data_for(model, data, **opening), model.num_classes > 0
    except InputError:
        if need_classes:
            raise
    return data_for(model, data, classes=None, **opening), False


def open_bank(model: SpotViT, data: Path, classes: Sequence[str] | None, skip: bool) -> Data:
    """The labelled images of a kNN bank, with the given classes or, by default, the model's."""
    if classes is None:
        limit = BANK_IMAGES if difficulty_of(data) else None
        return data_for(model, data, split="train", limit=limit, skip=skip)
    return open_data(data, split="train", transform=model.transform(), classes=classes, skip=skip)
