"""spot calibrate: choose stages and thresholds of a cascade on images without labels."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from spot.commands import options
from spot.evaluation.options import Loading

DEFAULT = Loading(split="train")


def calibrate(
    model: options.ModelArgument,
    /,
    data: options.Data,
    out: Path,
    loading: Annotated[Loading, arg(name="")] = DEFAULT,
    weights: options.Weights = None,
    prior: options.Prior = None,
    scale: options.Scale = None,
    tokens: tuple[int, ...] = (),
    lose: float = 0.01,
    agree: float | None = None,
    cost: float | None = None,
    merge: bool = True,
    base: bool = False,
    keep: Path | None = None,
) -> None:
    """Choose how many tokens come first, and how sure the model must be to stop, on images without labels.

    The result belongs beside its model as NAME.anytime.json, where predict --until, evaluate --anytime and
    model.look find it.

    Args:
        out: the .json file.
        tokens: budgets, of which at most two come before the whole grid; by default an eighth, a quarter, a half of it.
        lose: how much accuracy the cascade may lose, as the dense ViT's own probabilities expect it; 0.01 is a point.
        agree: instead, the share of images on which it must say what the dense ViT says, where the whole grid does.
        cost: instead, the share of the dense ViT's multiply-adds it may have; it then loses as little as that allows.
        merge: stages may merge similar tokens on the way (ToMe), which costs less.
        base: the last stage is the ViT that the model was retrofitted from, as a delta knows it.
        keep: a file that names images to calibrate on, one a line; by default all.

    example: spot calibrate vit-ti --data images --lose 0.01 --out vit-ti.anytime.json
    """
    import spot
    from spot import report
    from spot.data.images import Images, data_for, listed, open_data
    from spot.data.loader import loader
    from spot.data.picture import evaluation_transform
    from spot.errors import InputError
    from spot.evaluation.anytime import calibrate

    report.check_outputs(out)
    loaded = spot.load(model, weights=weights, scale=scale)
    if data == "scenes":
        images = data_for(loaded, data, **loading.opening())
    else:
        images = open_data(data, transform=evaluation_transform(loaded.data_config), **loading.opening())
    if keep is not None:
        names = listed(keep)
        if not isinstance(images, Images):
            raise InputError(f"{data} is not a folder, so {keep} cannot name its images")
        images.only(names)
    batches = loader(images, **loading.readers())
    asked = {"budgets": tokens, "lose": lose, "agree": agree, "cost": cost}
    cascade = calibrate(loaded, batches, **asked, merge=merge, base=base, prior=prior)  # type: ignore[arg-type]
    cascade.save(out)
    rows = [
        {"tokens": stage.tokens, "left in the end": stage.left(), "stops at": stage.threshold,
         "GMACs": stage.macs / 1e9}
        for stage in cascade.stages
    ]  # fmt: skip
    made = cascade.made
    report.show(rows, f"{model}, stage by stage", digits=3)
    report.say(
        f"On {made['images']} images {made['agreed']:.1%} agree with the dense ViT, which expects {made['lost']:.1%} "
        f"to be lost, at {made['macs']:.2f} of its multiply-adds. The calibration is in {out}."
    )
