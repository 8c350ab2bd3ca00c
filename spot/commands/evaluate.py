"""spot evaluate: accuracy and kNN of placements, budgets and baselines."""

from pathlib import Path
from typing import Any

from spot.commands import options


def evaluate(
    model: options.ModelArgument,
    /,
    data: options.Data,
    weights: options.Weights = None,
    prior: options.Priors = (),
    tokens: tuple[int, ...] = (),
    scale: options.Scale = None,
    seeds: int = 1,
    placements: tuple[Path, ...] = (),
    saliency: options.Saliency = None,
    baseline: tuple[options.Baseline, ...] = (),
    knn: Path | None = None,
    k: int = 20,
    temperature: float = 0.07,
    cache: Path | None = None,
    split: options.Split = "val",
    data_root: options.DataRoot = None,
    skip_unreadable: options.SkipUnreadable = False,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 64,
    workers: options.Workers = None,
    json: options.Json = None,
    predictions: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Measure accuracy for every prior and budget in one pass over the images.

    Percentages come with their 95 % interval; seeds are pooled, with their standard deviation. Under
    `accelerate launch` or torchrun the images are shared out, and the numbers stay the same.

    Args:
        tokens: budgets; by default the model's own.
        seeds: how many seeds to average over; priors that draw nothing are measured once.
        placements: files with a placement for each image, as spot search writes them.
        baseline: what one would use instead, at the same budgets; vit is the timm model itself.
        knn: labelled images, or a bank file, for k-nearest-neighbour accuracy of the features.
        k: how many neighbours vote.
        temperature: how much more a nearer neighbour's vote counts.
        cache: folder for kNN banks; by default spot/knn in the user's cache.
        predictions: write every image's label and predicted classes to this CSV file; - is standard output.
        plot: draw accuracy against tokens and cost.

    example: spot evaluate vit-ti --data imagenet --prior isotropic center --tokens 25 49 100 196
    """
    asked = dict(locals())
    import spot
    from spot import report
    from spot.evaluation.compare import compare
    from spot.hashes import hash_model
    from spot.plots import check_ending, save
    from spot.plots.accuracy import accuracy
    from spot.processes import this_process

    if plot is not None:
        check_ending(plot)
    report.check_outputs(json, predictions, plot)
    state = this_process()
    loaded = spot.load(model, weights=weights, scale=scale).to(state.device)
    compared = compare(
        loaded, data, priors=prior, tokens=tokens, seeds=seeds, placements=placements, baselines=baseline,
        saliency=saliency, knn=knn, k=k, temperature=temperature, cache=cache, split=split, root=data_root,
        unreadable="skip" if skip_unreadable else "stop", limit=limit, batch_size=batch_size, workers=workers,
    )  # fmt: skip
    if not state.is_main_process:
        return
    report.show(compared.table(), f"{model} on {data}", caption=compared.summary())
    if json is not None:
        made = compared.evaluation
        about: dict[str, Any] = {"arguments": asked, "model": loaded.name, "weights": hash_model(loaded)}
        about |= {"seconds": made.seconds, "waited": made.waited, "skipped": made.skipped}
        report.save_json(json, compared.rows, about)
    report.save_csv(predictions, compared.predictions() if predictions else [])
    if plot is not None:
        save(accuracy(compared.rows, title=f"{Path(model).name} on {Path(data).name}"), plot)
        report.say(f"The figure is in {plot}.")
