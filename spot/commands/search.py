"""spot search: the oracle on photographs, with pictures, or on a data set, into a placements file."""

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from spot.commands import options
from spot.evaluation.options import Loading


def search(
    images: options.Photos = (),
    /,
    *,
    data: options.Data | None = None,
    out: Path | None = None,
    model: options.Model = options.MODEL,
    weights: options.Weights = None,
    label: tuple[str, ...] = (),
    objective: Literal["descent", "ascent", "obfuscate", "entropy", "agree"] | None = None,
    tokens: int = 25,
    prior: options.Prior = None,
    scale: options.Scale = None,
    saliency: options.Saliency = None,
    seed: options.Seed = 0,
    preset: Literal["paper", "paper-long", "authors", "agree"] | None = None,
    steps: int | None = None,
    lr: float | None = None,
    optimizer: Literal["adam", "adamw", "sgd"] | None = None,
    project: bool | None = None,
    grid: bool = False,
    snap: Literal["end", "every-step"] = "end",
    fit: options.Fit = "crop",
    keep: Literal["trajectories", "positions"] = "trajectories",
    loading: Annotated[Loading, arg(name="")] = Loading(batch_size=32),  # noqa: B008 (frozen)
    mixed_precision: bool = False,
    json: options.Json = None,
) -> None:
    """Move tokens to where a model sees an image better, or worse, by gradient through the frozen model.

    With images, a picture of each shows the windows at the start and at the end and the way between,
    from dark purple to bright yellow (red for ascent). With --data, all images are searched into one
    placements file; started again after a kill it goes on where it stopped. Any model can be
    evaluated with that file: spot evaluate MODEL --data DIR --placements FILE. Under `accelerate launch`
    or torchrun the images are shared out.

    Args:
        out: the folder of the pictures (search), or with --data the .safetensors file.
        label: each image's class, by number or name, or one for all of them.
        objective: by default descent on the label, and without labels agree. ascent makes the label
            less probable, obfuscate makes a random wrong one more so; entropy and agree (with what
            the model says of the whole image) need no label.
        tokens: how many.
        preset: the paper's 5 steps at rate 0.003 or 10 at 0.01, what the authors' code does, or 20 at 0.01,
            which is the default for agree.
        steps: instead of the preset's.
        lr: instead of the preset's, in fractions of the image.
        optimizer: instead of the preset's.
        project: keep tokens in the image, instead of as the preset says.
        grid: the result must lie on the model's own patch grid.
        snap: with --grid, at the end only or at every step.
        keep: with --data, whole trajectories or only the final positions.
        mixed_precision: bfloat16 inside the model, on accelerators.

    example: spot search dog.jpg --label "golden retriever" --tokens 49
    """
    import spot
    from spot.errors import InputError
    from spot.evaluation.searches import on_data, on_photos
    from spot.placement.oracle import PRESETS
    from spot.processes import this_process

    if bool(images) == (data is not None):
        raise InputError("give either images or --data, one of them")
    if data is not None and (label or fit != "crop"):
        raise InputError("--label and --fit go with images; a data set brings its own labels, and is cropped")
    objective = objective or ("descent" if label or data is not None else "agree")
    loaded = spot.load(model, weights=weights, tokens=tokens, scale=scale).to(this_process().device)
    settings = PRESETS[preset or ("agree" if objective == "agree" else "paper")].changed(
        objective=objective, steps=steps, lr=lr, optimizer=optimizer, project=project, snap=snap,
        grid=loaded.grid_size if grid else None, mixed_precision=mixed_precision,
    )  # fmt: skip
    common: dict[str, Any] = {"settings": settings, "prior": prior, "saliency": saliency, "seed": seed}
    if data is None:
        common |= {"batch_size": loading.batch_size, "skip": loading.skip_unreadable, "fit": fit}
        on_photos(loaded, images, label, out or Path("search"), json, **common)
    else:
        on_data(loaded, data, out or Path("placements.safetensors"), json, loading, keep=keep, **common)
