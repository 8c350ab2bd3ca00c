"""spot calibrate: choose stages and thresholds of a cascade on unlabelled images."""

from pathlib import Path
from typing import Annotated, Any, Literal

from spot import options, report
from spot.errors import InputError


def calibrate(
    model: options.ModelArgument,
    /,
    data: options.Data,
    out: Path,
    loading: Annotated[options.LoadingOptions, options.Flat] = options.LoadingOptions(split="train"),
    weights: options.Weights = None,
    prior: options.Prior = None,
    tokens: options.Several[int] = (),
    lose: float = 0.01,
    agree: options.Maybe[float] = None,
    cost: options.Maybe[float] = None,
    time: options.Maybe[float] = None,
    runtime: Literal["eager", "onnx"] = "eager",
    no_merge: bool = False,
    only: options.Maybe[Path] = None,
) -> None:
    """Calibrate early exit: choose stages and their confidence thresholds on unlabelled images.

    Use the file with predict --cascade FILE, evaluate --cascade FILE, or spot.Cascade.load(FILE, model).

    example: spot calibrate vit-ti --data images --lose 0.01 --out vit-ti.cascade.json

    Args:
        out: the .json file
        tokens: numbers of tokens to choose from for early stages. Default: an eighth, a quarter and half of the grid
        lose: the largest expected loss of accuracy; 0.01 is one point
        agree: instead of --lose: the required agreement with the dense ViT, a share of images
        cost: instead of --lose: the largest share of the dense ViT's multiply-adds. The cascade then loses as little
            as possible
        time: as --cost, with the latency for one image on one thread of this machine
        runtime: the runtime for --time: eager PyTorch, or the files that spot export --cascade would write
        no_merge: leave out stages that merge similar tokens (ToMe)
        only: a file with the images to calibrate on, one path per line. Default: all
    """
    options.check_prior(prior)
    from spot.data.folders import read_keys
    from spot.data.images import Images, data_for
    from spot.data.loader import loader
    from spot.evaluation.early_exit import calibrate
    from spot.models.family import at_budget
    from spot.models.loading import load_source
    from spot.placement.policy import is_policy_file

    report.check_outputs(out)
    if is_policy_file(prior):
        raise InputError("--prior cannot be a file here; give the model its policy first, and use --prior learned")
    runner: dict[str, Any] = {}
    if runtime == "onnx":
        from spot.export.bench import onnx_stage

        if time is None:
            raise InputError("--runtime onnx goes with --time: other goals do not depend on it")
        runner["runner"] = onnx_stage
    source = load_source(model, weights=weights)
    images = data_for(at_budget(source), data, classes=None, **loading.opening())
    if only is not None:
        names = read_keys(only)
        if not isinstance(images, Images):
            raise InputError(f"{data} is not a folder, so {only} cannot name its images")
        images.select(names)
    batches = loader(images, **loading.readers())
    goal: dict[str, Any] = {"lose": lose, "agree": agree, "cost": cost, "time": time}
    cascade = calibrate(source, batches, budgets=tokens, **goal, merge=not no_merge, prior=prior, **runner)
    cascade.save(out)
    rows = [
        {"tokens": stage.tokens, "left in the end": stage.tokens_left, "stops at": stage.threshold,
         "GMACs": stage.macs / 1e9}
        for stage in cascade.stages
    ]  # fmt: skip
    result = cascade.calibration
    duration = "" if time is None else f" and {result['took']:.2f} of the time"
    report.show(rows, f"{model}, stage by stage", digits=3)
    report.say(
        f"On {result['images']} images it agrees with the dense ViT for {result['agreed']:.1%}; the expected loss is "
        f"{result['lost']:.1%}, at {result['macs']:.2f} of the multiply-adds{duration}. The calibration is in {out}."
    )
