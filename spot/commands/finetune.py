"""spot finetune: classify with a pretrained encoder."""

from typing import Annotated

import tyro

from spot.commands.training import CommandOptions, begin


def finetune(
    model: tyro.conf.Positional[str],
    options: Annotated[CommandOptions, tyro.conf.arg(name="")],
    recipe: str = "mae-finetune",
    classes: int | None = None,
) -> None:
    """Fine-tune an encoder to classify labelled images, with a new head where the number of classes is new.

    Args:
        model: a timm name, or a model that spot saved, such as `spot pretrain` does.
        recipe: mae-finetune, or another supervised one.
        classes: how many classes; by default as many as the data has class folders.

    example: spot finetune runs/mae/model --data imagenet --out runs/finetuned --accumulate 16
    """
    begin(model, recipe, ("supervised",), options, new_head=True, classes=classes)
