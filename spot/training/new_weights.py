"""Models with new weights: a ViT with random weights, or a new classifier on a pretrained encoder."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from spot.data.classes import class_folders
from spot.data.difficulty import difficulty_of
from spot.data.images import open_data
from spot.data.scenes import CLASSES
from spot.draws import Draw, seeded
from spot.errors import InputError
from spot.models.spot_vit import SpotViT, adapt
from spot.models.timm_vit import create_timm
from spot.options import TrainOptions
from spot.training.recipes import Recipe

AMPLITUDE = 0.3  # of the initial position embedding; about that of the patch embedding


def random_vit(name: str, options: Mapping[str, Any], seed: int = 0) -> SpotViT:
    """Create a timm ViT with random weights, from its name and timm's options.

    Position embeddings start as sine waves (as in MAE) instead of timm's noise. Training is faster, and the
    embedding is smooth between grid cells.
    """
    try:
        with seeded(seed, Draw.WEIGHTS):
            model = adapt(name, **options)
    except (ArithmeticError, AssertionError) as error:  # from timm, for 0 heads or heads that do not divide the width
        raise InputError(f"timm cannot build {name} with {dict(options)}: {error}") from error
    table = model.vit.pos_embed
    if table is not None:
        prefix = 0 if model.vit.no_embed_class else model.num_prefix_tokens
        with torch.no_grad():
            table.zero_()
            table[0, prefix:] = AMPLITUDE * sine_embedding(model.grid().cpu(), model.embed_dim)
    return model


def sine_embedding(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines of y, then of x, with 0.5 to 2 periods per image: (N, 2) → (N, width)."""
    periods = 2 ** torch.linspace(-1, 1, math.ceil(width / 4))
    angles = 2 * math.pi * positions[:, :, None] * periods  # (N, 2, width / 4)
    return torch.cat([angles.sin(), angles.cos()], 2).flatten(1)[:, :width]


def with_classifier(model: SpotViT, classes: int, pool: str | None, seed: int = 0, *, anew: bool = False) -> SpotViT:
    """Replace the head: `classes` outputs on the class token (pool="token") or on the mean of the tokens ("avg").

    As in He et al., mean pooling is followed by a new norm. A model that already has such a head is returned
    unchanged, unless `anew` is set.
    """
    old = model.vit
    if not isinstance(old, VisionTransformer):
        raise InputError(f"fine-tuning with a new head is for timm's VisionTransformer, not {type(old).__name__}")
    pool = old.global_pool if pool is None else pool
    if classes == old.num_classes and pool == old.global_pool and not anew:
        return model
    options = {**model.options, "img_size": model.img_size, "num_classes": classes, "global_pool": pool}
    overlay = {key: model.data_config[key] for key in ("mean", "std", "interpolation", "crop_pct")}
    with seeded(seed, Draw.HEAD):
        vit = create_timm(model.name, pretrained_cfg_overlay=overlay, **options)
    new = {name for name in vit.state_dict() if name.startswith(("head.", "fc_norm.", "norm."))}
    dropped = ("head.", "fc_norm.") if "norm.weight" in new else ("head.", "fc_norm.", "norm.")
    state = {name: tensor for name, tensor in old.state_dict().items() if not name.startswith(dropped)}
    missing, surplus = vit.load_state_dict(state, strict=False)
    if surplus or set(missing) - new:
        raise InputError(f"timm builds {model.name} differently from the model given: {[*missing, *surplus][:3]}")
    return SpotViT(vit, tokens=model.tokens, prior=model.prior, sigma=model.sigma, options=options)


def classifier_for_data(model: SpotViT, recipe: Recipe, options: TrainOptions) -> SpotViT:
    """Give the model a head for the data's classes, with their names. A head for these classes is kept."""
    names = list(CLASSES)
    if difficulty_of(options.data) is None:
        names = open_data(options.data, transform=model.transform(), split=options.split).classes
    if not names:
        raise InputError(f"{options.data} has no classes to fine-tune for; one folder per class is needed")
    known, pool = class_folders(model), getattr(recipe, "global_pool", None)
    new = with_classifier(model, len(names), pool, recipe.seed, anew=isinstance(known, list) and known != names)
    if known != names:
        new.class_names = names
    return new
