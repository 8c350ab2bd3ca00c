"""spot retrofit: teach a ViT to read off-grid tokens."""

from typing import Annotated

import tyro

from spot.commands.training import CommandOptions, begin


def retrofit(
    model: tyro.conf.Positional[str], options: Annotated[CommandOptions, tyro.conf.arg(name="")], recipe: str = "distil"
) -> None:
    """Teach a pretrained ViT to read off-grid tokens, keeping what it was trained for.

    The distil recipe needs images only; cls-in1k and cls-in21k are the paper's and need labels.
    After an interruption the same command goes on where it stopped.

    Args:
        model: a timm name, or a model that spot saved.
        recipe: distil, cls-in1k or cls-in21k.

    example: spot retrofit vit_tiny_patch16_224.augreg_in21k_ft_in1k --data images --out runs/tiny
    """
    begin(model, recipe, ("distil", "supervised"), options)
