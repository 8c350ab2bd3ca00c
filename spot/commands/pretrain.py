"""spot pretrain: a masked autoencoder on off-grid windows."""

from spot.commands.options import ModelArgument, TrainingOptions


def pretrain(
    model: ModelArgument,
    options: TrainingOptions,
    recipe: str = "mae-in1k",
) -> None:
    """Train a ViT to reconstruct hidden off-grid windows (MAE); it needs no labels. Only the encoder is kept.

    This is also how the paper retrofits a model that was pretrained so. With --fresh training begins
    with new weights; the recipe may then also be a supervised one. After an interruption the same
    command goes on where it stopped.

    Args:
        recipe: mae-in1k, scenes-mae, or a supervised one.

    example: spot pretrain vit_base_patch16_224.mae --data imagenet --out runs/mae --accumulate 64
    """
    from spot.training.run import begin

    begin(model, recipe, ("mae", "supervised"), options)
