"""A ViT with fresh weights, to train from nothing."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spot.draws import Draw, seeded
from spot.errors import InputError
from spot.models.spot_vit import SpotViT, adapt
from spot.training.fields import literal, pairs

AMPLITUDE = 0.3  # of the position table: about as large as the patches' embedding, so that both are heard


def fresh(name: str, options: Mapping[str, Any], seed: int = 0) -> SpotViT:
    """A timm ViT by name and timm's options, its weights drawn from the seed.

    timm starts position tables as small noise. Waves (as in MAE) are learned from sooner, and they
    are smooth between the grid's cells, where off-grid tokens will stand.
    """
    try:
        with seeded(seed, Draw.WEIGHTS):
            model = adapt(name, **options)
    except (ArithmeticError, AssertionError) as error:  # timm's: no heads, or heads that do not divide the width
        raise InputError(f"timm cannot build {name} with {dict(options)}: {error}") from error
    table = model.vit.pos_embed
    if table is not None:
        prefix = 0 if model.vit.no_embed_class else model.num_prefix_tokens
        with torch.no_grad():
            table.zero_()
            table[0, prefix:] = AMPLITUDE * waves(model.grid().cpu(), model.embed_dim)
    return model


def waves(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines of y, then of x, from half a period to two periods a frame: (N, 2) → (N, width)."""
    periods = 2 ** torch.linspace(-1, 1, math.ceil(width / 4))
    angles = 2 * math.pi * positions[:, :, None] * periods  # (N, 2, width / 4)
    return torch.cat([angles.sin(), angles.cos()], 2).flatten(1)[:, :width]


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """`embed_dim=128` and the like, as timm takes them."""
    given = pairs(words, "--fresh takes timm's options as NAME=VALUE")
    return {name: literal(value) for name, value in given.items()}
