"""spot retrofit: teach a ViT to read off-grid tokens."""

from spot.commands.options import ModelArgument, TrainingOptions


def retrofit(model: ModelArgument, options: TrainingOptions, recipe: str = "distil") -> None:
    """Teach a pretrained ViT to read off-grid tokens, keeping what it was trained for.

    The distil recipe needs images only; cls-in1k and cls-in21k are the paper's and need labels.
    After an interruption the same command goes on where it stopped.

    Args:
        recipe: distil, cls-in1k or cls-in21k.

    example: spot retrofit vit_tiny_patch16_224.augreg_in21k_ft_in1k --data images --out runs/tiny
    """
    from spot.training.run import begin

    begin(model, recipe, ("distil", "supervised"), options)
