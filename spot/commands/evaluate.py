"""spot evaluate: accuracy and kNN of placements, budgets and baselines."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from spot.commands import options
from spot.evaluation.options import Comparing


def evaluate(
    model: options.ModelArgument,
    /,
    data: options.Data,
    asked: Annotated[Comparing, arg(name="")],
    weights: options.Weights = None,
    scale: options.Scale = None,
    json: options.Json = None,
    predictions: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Measure accuracy for every prior and budget in one pass over the images.

    Percentages come with their 95 % interval; seeds are pooled, with their standard deviation. Under
    `accelerate launch` or torchrun the images are shared out, and the numbers stay the same.

    Args:
        predictions: write every image's label and predicted classes to this CSV file; - is standard output.
        plot: draw accuracy against tokens and cost.

    example: spot evaluate vit-ti --data imagenet --prior isotropic center --tokens 25 49 100 196
    """
    import spot
    from spot import report
    from spot.evaluation.compare import compare
    from spot.hashes import hash_model
    from spot.plots import check_ending, save
    from spot.plots.accuracy import accuracy
    from spot.processes import this_process

    check_ending(plot)
    report.check_outputs(json, predictions, plot)
    state = this_process()
    loaded = spot.load(model, weights=weights, scale=scale).to(state.device)
    compared = compare(loaded, data, **vars(asked))
    if not state.is_main_process:
        return
    report.show(compared.table(), f"{model} on {data}", caption=compared.summary())
    if json is not None:
        made = compared.evaluation
        arguments = {"model": model, "data": data, "weights": weights, "scale": scale, **asdict(asked)}
        about: dict[str, Any] = {"arguments": arguments, "model": loaded.name, "weights": hash_model(loaded)}
        about |= {"seconds": made.seconds, "waited": made.waited, "skipped": made.skipped}
        report.save_json(json, compared.rows, about)
    report.save_csv(predictions, compared.predictions() if predictions else [])
    if plot is not None:
        save(accuracy(compared.rows, title=f"{Path(model).name} on {Path(data).name}"), plot)
        report.say(f"The figure is in {plot}.")
