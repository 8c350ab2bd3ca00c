"""spot finetune: classify with a pretrained encoder."""

from spot.commands.options import ModelArgument, TrainingOptions


def finetune(
    model: ModelArgument,
    options: TrainingOptions,
    recipe: str = "finetune-small",
    classes: int | None = None,
) -> None:
    """Fine-tune an encoder to classify labelled images, with a new head where the classes are new to it.

    The names of the class folders stay with the model. docs/fine-tuning.md is a guide.

    Args:
        recipe: finetune-small (a few hundred images or more), mae-finetune (after spot pretrain), or another
            supervised one.
        classes: how many classes; by default as many as the data has class folders.

    example: spot finetune vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot --data photos --out runs/mine
    """
    from spot.training.run import begin

    begin(model, recipe, ("supervised",), options, new_head=True, classes=classes)
