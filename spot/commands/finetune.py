"""spot finetune: classify with a pretrained encoder."""

from spot.commands.options import ModelArgument, TrainingOptions


def finetune(
    model: ModelArgument,
    options: TrainingOptions,
    recipe: str = "mae-finetune",
    classes: int | None = None,
) -> None:
    """Fine-tune an encoder to classify labelled images, with a new head where the number of classes is new.

    Args:
        recipe: mae-finetune, or another supervised one.
        classes: how many classes; by default as many as the data has class folders.

    example: spot finetune runs/mae/model --data imagenet --out runs/finetuned --accumulate 16
    """
    options.begin(model, recipe, ("supervised",), new_head=True, classes=classes)
