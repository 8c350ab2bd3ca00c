"""spot embed: the features of a folder of images."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

import spot
from spot import options, report
from spot.errors import InputError


def embed(
    data: Annotated[Positional[str], arg(metavar="DATA", help="images, with or without classes: " + options.DATA)],
    /,
    out: Path,
    model: options.Model = options.MODEL,
    weights: options.Weights = None,
    tokens: options.Maybe[int] = None,
    prior: options.Prior = None,
    scale: options.Scale = None,
    seed: options.Seed = 0,
    loading: Annotated[options.LoadingOptions, options.Flat] = options.LoadingOptions(),
) -> None:
    """Write the pooled features, names and labels of images to one safetensors file.

    An interrupted run resumes. `accelerate launch` or torchrun distributes the images.
    spot.Placements.load reads the file: its values are "features" and "labels".

    example: spot embed photos/ --model vit-ti --tokens 49 --out features.safetensors

    Args:
        out: the .safetensors file
        tokens: number of tokens. Default: the model's own
    """
    options.check_prior(prior)
    from spot.evaluation.compare import open_labelled
    from spot.evaluation.features import embed
    from spot.processes import this_process

    if out.suffix != ".safetensors":
        raise InputError(f"features are kept in a .safetensors file, got {out}")
    state = this_process()
    loaded = spot.load(model, weights=weights, tokens=tokens, prior=prior, scale=scale).to(state.device)
    images, _ = open_labelled(loaded, data, need_classes=False, **loading.opening())
    made = embed(loaded, images, out, seed=seed, **loading.readers())
    if state.is_main_process:
        report.say(f"{out} has {len(made)} features of {made.values['features'].shape[1]} numbers.")
