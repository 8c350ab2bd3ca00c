"""spot retrofit, spot pretrain and spot finetune: training runs with different kinds of recipes."""

from typing import Any

from spot.options import ModelArgument, Train


def begin(*args: Any, **options: Any) -> None:
    from spot.training import run  # imported here, so that --help does not load torch

    run.begin(*args, **options)


def retrofit(model: ModelArgument, options: Train, recipe: str = "distil") -> None:
    """Fine-tune a pretrained ViT for few off-grid tokens, for the same classes.

    The recipe distil needs no labels. cls-in1k and cls-in21k are the paper's and need labels.
    After an interruption the same command resumes.

    Args:
        recipe: distil, distil-sizes, cls-in1k or cls-in21k.

    example: spot retrofit vit_tiny_patch16_224.augreg_in21k_ft_in1k --data images --out runs/tiny
    """
    begin(model, recipe, ("distil", "supervised"), options)


def pretrain(
    model: ModelArgument,
    options: Train,
    recipe: str = "mae-in1k",
) -> None:
    """Train a masked autoencoder (MAE) on off-grid windows, without labels. Only the encoder is kept.

    The paper retrofits MAE models in this way. With --fresh, training starts from random weights, and the recipe can
    also be a supervised one. After an interruption the same command resumes.

    Args:
        recipe: mae-in1k, scenes-mae, or a supervised one.

    example: spot pretrain vit_base_patch16_224.mae --data imagenet --out runs/mae --accumulate 64
    """
    begin(model, recipe, ("mae", "supervised"), options)


def finetune(
    model: ModelArgument,
    options: Train,
    recipe: str = "finetune-small",
    classes: int | None = None,
) -> None:
    """Fine-tune a model on labelled images, with a new head for new classes.

    The names of the class folders are saved with the model. The guide is docs/training.md.

    Args:
        recipe: finetune-small (for a few hundred images or more), mae-finetune (after spot pretrain), or another
            supervised recipe.
        classes: number of classes. Default: the number of class folders.

    example: spot finetune vit-ti --data photos --out runs/mine
    """
    begin(model, recipe, ("supervised",), options, new_head=True, classes=classes)
