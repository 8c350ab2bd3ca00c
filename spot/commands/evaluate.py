"""spot evaluate: accuracy and kNN of placements, budgets and baselines."""

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from spot.data.images import Data
    from spot.evaluation.accuracy import Evaluation, Maps, Setting
    from spot.evaluation.knn import Bank

Baseline = Literal["vit", "patch-dropout", "tome", "elastic"]


def evaluate(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")],
    /,
    data: str,
    weights: Path | None = None,
    prior: tuple[str, ...] = (),
    tokens: tuple[int, ...] = (),
    seeds: int = 1,
    placements: tuple[Path, ...] = (),
    saliency: str | None = None,
    baseline: tuple[Baseline, ...] = (),
    knn: Path | None = None,
    k: int = 20,
    temperature: float = 0.07,
    cache: Path | None = None,
    split: str = "val",
    data_root: Path | None = None,
    unreadable: Literal["stop", "skip"] = "stop",
    limit: int | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    json: Path | None = None,
    predictions: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Measure accuracy for every prior and budget in one pass over the images.

    Percentages come with their 95 % interval; seeds are pooled, with their standard deviation. Under
    `accelerate launch` or torchrun the images are shared out, and the numbers stay the same.

    Args:
        model: a built-in model, a folder or file that spot saved, a hub id, or a timm name.
        data: a folder with one sub-folder per class, ImageNet's root, a timm data set, or "scenes".
        weights: a file with the timm model's weights, instead of downloading them.
        prior: where tokens go; by default as the model says. salient, focus and background need --saliency.
        tokens: budgets; by default the model's own.
        seeds: how many seeds to average over; priors that draw nothing are measured once.
        placements: files with a placement for each image, as spot search writes them.
        saliency: spectral, clipseg, an .onnx file or a folder of maps.
        baseline: what one would use instead, at the same budgets; vit is the timm model itself.
        knn: labelled images, or a bank file, for k-nearest-neighbour accuracy of the features.
        k: how many neighbours vote.
        temperature: how much more a nearer neighbour's vote counts.
        cache: folder for kNN banks; by default spot/knn in the user's cache.
        split: val, train or test, where the data has several.
        data_root: where a timm data set keeps its files.
        unreadable: stop at an image that cannot be read, or skip it and count it.
        limit: at most so many images, evenly spread over the classes.
        batch_size: images at a time; changes speed only.
        workers: processes that read images; by default one less than there are cores, at most 8.
        json: write the table, and what made it, to this file.
        predictions: write every image's label and predicted classes to this CSV file.
        plot: draw accuracy against tokens and cost.

    example: spot evaluate vit_tiny_patch16_224 --data imagenet --prior isotropic center --tokens 25 49 100 196
    """
    asked = dict(locals())
    import spot
    from spot import report
    from spot.data.images import available_workers, loader
    from spot.evaluation.accuracy import evaluate as measure
    from spot.evaluation.knn import knn_rows
    from spot.processes import this_process
    from spot.store import hash_model

    if plot is not None:
        from spot.plots import check_ending, save
        from spot.plots.accuracy import accuracy

        check_ending(plot)
    state = this_process()
    loaded = spot.load(model, weights=weights).to(state.device)
    settings = asked_for(loaded, prior, tokens, seeds, placements, baseline)
    workers = available_workers() if workers is None else workers
    reading: dict[str, Any] = {"unreadable": unreadable, "limit": limit, "root": data_root}
    images, known = opened(loaded, data, split, need_classes=knn is None, **reading)
    maps = mapped(loaded, saliency, data)
    batches = loader(images, batch_size, workers, process=state.process_index, processes=state.num_processes)
    banks = None
    if knn is not None:
        reading = {"unreadable": unreadable, "known": known}
        banks = banks_of(loaded, knn, images, settings, cache, batch_size, workers, saliency, **reading)
        banks[0].refuse_vote(k, temperature)
    found = measure(
        loaded,
        batches,
        settings,
        saliency=maps,
        features=knn is not None,
        accuracy=known,
        shown=state.is_main_process,
    )
    rows = found.rows() if known else without_accuracy(found)
    if banks is not None:
        votes = knn_rows(found, banks, k=k, temperature=temperature, device=state.device)
        rows = [{**row, **vote} for row, vote in zip(rows, votes, strict=True)]
    if not state.is_main_process:
        return
    rows = with_cost(rows, loaded, found)
    report.show(readable(rows), f"{model} on {data}", caption=summary(found, known))
    if json is not None:
        about = {
            "arguments": asked,
            "model": loaded.name,
            "weights": hash_model(loaded),
            "seconds": found.seconds,
            "waited": found.waited,
            "skipped": found.skipped,
        }
        report.save_json(json, rows, about)
    if predictions is not None:
        save_predictions(predictions, found)
    if plot is not None:
        save(accuracy(rows, title=f"{Path(model).name} on {Path(data).name}"), plot)
        report.console.print(f"The figure is in {plot}.", soft_wrap=True)


def asked_for(
    model: Any,
    prior: Sequence[str],
    tokens: Sequence[int],
    seeds: int,
    placements: Sequence[Path],
    baseline: Sequence[str],
) -> "list[Setting]":
    """One setting for every prior, baseline, budget and seed; the model's own where nothing is asked for."""
    from spot.errors import InputError
    from spot.evaluation.accuracy import Reader, Setting
    from spot.models.elastic import ElasticViT
    from spot.models.patch_dropout import PatchDropout
    from spot.models.plain import PlainViT
    from spot.models.tome import ToMe
    from spot.placement.files import Placements

    if seeds < 1:
        raise InputError(f"at least one seed is needed, got {seeds}")
    makers = {
        "patch-dropout": PatchDropout,
        "tome": lambda model, budget: ToMe(model, tokens=budget),
        "elastic": ElasticViT,
    }
    budgets = tokens or (model.tokens,)
    chosen: list[Setting] = []
    if "vit" in baseline:
        chosen.append(Setting(PlainViT(model), name="vit"))
    for name in baseline:
        if name != "vit":
            chosen += [Setting(makers[name](model, budget), name=name) for budget in budgets]
    for name in prior or (() if baseline or placements else (model.prior,)):
        chosen += [Setting(name, budget) for budget in budgets]
    chosen += [Setting(Placements.load(path), name=path.stem) for path in placements]
    return [
        replace(setting, seed=seed)
        for setting in chosen
        for seed in range(seeds if Reader(model, setting).draws() else 1)
    ]


def opened(model: Any, data: str, split: str, *, need_classes: bool, **reading: Any) -> "tuple[Data, bool]":
    """The images, and whether their labels are the model's classes. Neighbours vote for any classes."""
    from spot.data.images import data_for, open_data
    from spot.data.picture import evaluation_transform
    from spot.errors import InputError

    if model.num_classes == 0 and need_classes:
        raise InputError(f"{model.name} has no classifier; measure its features with --knn")
    try:
        return data_for(model, data, split=split, **reading), model.num_classes > 0
    except InputError:
        if need_classes:
            raise
    return open_data(data, transform=evaluation_transform(model.data_config), split=split, **reading), False


def mapped(model: Any, saliency: str | None, data: str) -> "Maps | None":
    """Saliency maps for images as the model sees them."""
    if saliency is None:
        return None
    from spot.data.picture import evaluation_transform
    from spot.placement.saliency import resolve_saliency

    return resolve_saliency(saliency, model.data_config, evaluation_transform(model.data_config), data)


def banks_of(
    model: Any,
    source: Path,
    images: "Data",
    settings: "Sequence[Setting]",
    cache: Path | None,
    batch_size: int,
    workers: int,
    saliency: str | None,
    *,
    unreadable: Any,
    known: bool,
) -> "list[Bank]":
    """A kNN bank for each setting: one file for all, or one each, made from images."""
    from spot.data.images import data_for, open_data
    from spot.data.picture import evaluation_transform
    from spot.evaluation.knn import Bank, build_banks
    from spot.processes import this_process
    from spot.store import hash_model

    if source.suffix == ".safetensors":
        banks = [Bank.load(source)] * len(settings)
    else:
        transform = evaluation_transform(model.data_config)
        labelled = (
            data_for(model, source, split="train", unreadable=unreadable)
            if known
            else open_data(source, transform=transform, split="train", unreadable=unreadable, classes=images.classes)
        )
        banks = build_banks(
            model,
            labelled,
            settings,
            cache or user_cache(),
            batch_size=batch_size,
            workers=workers,
            saliency=mapped(model, saliency, str(source)),
            shown=this_process().is_main_process,
        )
    banks[0].refuse_other(str(source), model.embed_dim, weights=hash_model(model), classes=list(images.classes))
    return banks


def user_cache() -> Path:
    """Where files go that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spot" / "knn"


def with_cost(rows: list[dict[str, Any]], model: Any, found: "Evaluation") -> list[dict[str, Any]]:
    """Rows with the multiply-adds of one image, in billions, after the budget."""
    from spot.evaluation.accuracy import Reader
    from spot.evaluation.cost import macs

    table = []
    for row, members in zip(rows, found.groups(), strict=True):
        cost = macs(Reader(model, found.settings[members[0]]).model) / 1e9
        table.append({"placement": row["placement"], "tokens": row["tokens"], "gmacs": cost, **row})
    return table


def without_accuracy(found: "Evaluation") -> list[dict[str, Any]]:
    """Rows for data whose classes are not the model's: what can still be said."""
    kept = ("placement", "tokens", "seeds", "images")
    return [{name: row[name] for name in kept} for row in found.rows()]


def readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table as a person reads it, in percent; the file keeps the numbers apart."""
    table = []
    for row in rows:
        line: dict[str, Any] = {"placement": row["placement"], "tokens": row["tokens"], "GMACs": row["gmacs"]}
        if "top1" in row:
            line |= {"top-1": row["top1"], "95 %": f"{row['low']:.1f}–{row['high']:.1f}"}
            line |= {"top-5": row["top5"], "loss": row["loss"]}
        line |= {"±": row.get("std"), "kNN": row.get("knn"), "kNN ±": row.get("knn_std")}
        table.append(line)
    empty = {name for name in table[0] if all(line[name] is None for line in table)}
    return [{name: value for name, value in line.items() if name not in empty} for line in table]


def summary(found: "Evaluation", known: bool) -> str:
    """What the table stands on, and whether reading images held the model up."""
    share = found.waited / max(found.seconds, 1e-9)
    text = (
        f"{len(found.keys)} images in {found.seconds:.1f} s, {found.waited:.1f} s of it ({share:.0%}) waiting for data"
    )
    if share > 0.3:
        text += "; more --workers may help"
    if found.skipped:
        text += f". {len(found.skipped)} could not be read and are not counted, the first {found.skipped[0]}"
    if not known:
        text += ". The model has no classifier for these classes, so only neighbours vote"
    return text + "."


def save_predictions(path: Path, found: "Evaluation") -> None:
    """Key, label, and the class each setting predicted, one line per image."""
    from spot.store import whole

    names = [
        f"{setting.label} {tokens} seed {setting.seed}"
        for setting, tokens in zip(found.settings, found.tokens, strict=True)
    ]
    with whole(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["key", "label", *names])
        for key, label, row in zip(found.keys, found.labels.tolist(), found.predictions.T.tolist(), strict=True):
            writer.writerow([key, label, *row])
