"""spot evaluate: accuracy and kNN of placements, budgets and baselines."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from spot import options, report


def evaluate(
    model: options.ModelArgument,
    /,
    data: options.Data,
    settings: Annotated[options.EvaluateOptions, options.Flat],
    weights: options.Weights = None,
    scale: options.Scale = None,
    early_exit: bool = False,
    cascade: options.Maybe[Path] = None,
    json: options.Json = None,
    predictions: options.Maybe[Path] = None,
    plot: options.Maybe[Path] = None,
) -> None:
    """Measure accuracy for every prior and budget in one pass over the images.

    Percentages have 95 % intervals. Several seeds are averaged, with their standard deviation. Start it
    with `accelerate launch` or torchrun to distribute the images; the numbers stay the same.

    example: spot evaluate vit-ti --data imagenet --prior isotropic center --tokens 25 49 100 196

    Args:
        early_exit: also measure the model's cascade: few tokens first, more if the confidence is low
        cascade: use this file of spot calibrate instead of the shipped cascade
        predictions: write the label and the predicted class of every image to this CSV file; - is standard output
        plot: file for a plot of accuracy against tokens and cost
    """
    options.check_prior(*settings.prior)
    from spot.evaluation.compare import compare
    from spot.models.cascade import Cascade
    from spot.models.family import hash_weights
    from spot.models.loading import load_source
    from spot.plots import check_ending, save
    from spot.plots.accuracy import accuracy
    from spot.processes import this_process

    check_ending(plot)
    report.check_outputs(json, predictions, plot)
    source = load_source(model, weights=weights, scale=scale)
    exits = Cascade.load(cascade or model, source) if early_exit or cascade is not None else None
    compared = compare(source, data, exits, **vars(settings))
    if not this_process().is_main_process:
        return
    report.show(compared.table(), f"{model} on {data}", caption=compared.summary())
    if json is not None:
        made = compared.evaluation
        arguments = {"model": model, "data": data, "weights": weights, "scale": scale, **asdict(settings)}
        about: dict[str, Any] = {"arguments": arguments, "model": source.name, "weights": hash_weights(source)}
        about |= {"seconds": made.seconds, "waited": made.waited, "skipped": made.skipped}
        report.save_json(json, compared.rows, about)
    report.save_csv(predictions, compared.predictions() if predictions else [])
    if plot is not None:
        save(accuracy(compared.rows, title=f"{Path(model).name} on {Path(data).name}"), plot)
        report.say(f"The figure is in {plot}.")
