"""spot search: oracle search on photographs, drawn as pictures, or on a data set, saved as a placements file."""

from pathlib import Path
from typing import Annotated, Any, Literal

import spot
from spot import options
from spot.errors import InputError


def search(
    images: options.Photos = (),
    /,
    *,
    data: options.DataInstead = None,
    out: options.Maybe[Path] = None,
    model: options.Model = options.MODEL,
    weights: options.Weights = None,
    label: options.Several[str] = (),
    objective: options.Maybe[Literal["descent", "ascent", "obfuscate", "entropy", "agree"]] = None,
    tokens: int = 25,
    prior: options.Prior = None,
    scale: options.Scale = None,
    saliency: options.Saliency = None,
    seed: options.Seed = 0,
    preset: options.Maybe[Literal["paper", "paper-long", "authors", "agree"]] = None,
    steps: options.Maybe[int] = None,
    lr: options.Maybe[float] = None,
    grid: bool = False,
    fit: options.Fit = None,
    keep: Literal["trajectories", "positions"] = "trajectories",
    loading: Annotated[options.LoadingOptions, options.Flat] = options.LoadingOptions(batch_size=32),
    json: options.Json = None,
) -> None:
    """Optimise token positions by gradient through the frozen model.

    With images, it draws the windows before and after the search, and the path of each token from dark purple to
    bright yellow (red for ascent). With --data, it writes the positions of all images to one placements file, and an
    interrupted search resumes. Use the file with spot evaluate MODEL --data DIR --placements FILE.
    Start it with `accelerate launch` or torchrun to distribute the images over processes.

    example: spot search dog.jpg --label "golden retriever" --tokens 49

    Args:
        out: folder for the pictures (default: search), or with --data the .safetensors file
        label: the class of each image, or one class for all, by number or name
        objective: descent raises the label's probability, ascent lowers it, obfuscate raises that of a random wrong
            label. Without labels, agree matches the full-grid prediction, and entropy lowers the entropy.
            Default: descent with labels, agree without
        tokens: number of tokens
        preset: paper: 5 steps with learning rate 0.003. paper-long: 10 steps with 0.01. authors: as in the authors'
            code. agree: 20 steps with 0.01, the default for the objective agree
        steps: number of steps, instead of the preset's
        lr: learning rate in fractions of the image, instead of the preset's
        grid: snap the result to the model's patch grid
        keep: with --data: keep whole trajectories, or only the final positions
    """
    options.check_prior(prior)
    from spot.evaluation.searches import on_data, on_photos
    from spot.placement.oracle import PRESETS
    from spot.processes import this_process

    if bool(images) == (data is not None):
        raise InputError("give either images or --data, one of them")
    if data is not None and (label or fit is not None):
        raise InputError("--label and --fit go with images; a data set brings its own labels, and is cropped")
    objective = objective or ("descent" if label or data is not None else "agree")
    loaded = spot.load(model, weights=weights, tokens=tokens, prior=prior, scale=scale).to(this_process().device)
    settings = PRESETS[preset or ("agree" if objective == "agree" else "paper")].changed(
        objective=objective, steps=steps, lr=lr, grid=loaded.grid_size if grid else None
    )
    common: dict[str, Any] = {"title": model, "settings": settings, "saliency": saliency, "seed": seed}
    if data is None:
        common |= {"batch_size": loading.batch_size, "skip": loading.skip_unreadable, "fit": fit or "crop"}
        on_photos(loaded, images, label, out or Path("search"), json, **common)
    else:
        on_data(loaded, data, out or Path("placements.safetensors"), json, loading, keep=keep, **common)
