"""spot pretrain: a masked autoencoder on off-grid windows."""

from typing import Annotated

import tyro

from spot.commands.training import CommandOptions, begin


def pretrain(
    model: tyro.conf.Positional[str],
    options: Annotated[CommandOptions, tyro.conf.arg(name="")],
    recipe: str = "mae-in1k",
) -> None:
    """Train a ViT to paint hidden off-grid windows (MAE); it needs no labels. Only the encoder is kept.

    This is also how the paper retrofits a model that was pretrained so. With --fresh training begins
    with new weights; the recipe may then also be a supervised one. After an interruption the same
    command goes on where it stopped.

    Args:
        model: a timm name, or a model that spot saved.
        recipe: mae-in1k, scenes-mae, or a supervised one.

    example: spot pretrain vit_base_patch16_224.mae --data imagenet --out runs/mae --accumulate 64
    """
    begin(model, recipe, ("mae", "supervised"), options)
