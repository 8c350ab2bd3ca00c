"""spot retrofit, spot pretrain and spot finetune: training runs with different kinds of recipes."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from spot import report
from spot.errors import unknown
from spot.options import Flat, Maybe, ModelArgument, Several, TrainOptions, Weights


@dataclass(frozen=True, kw_only=True)
class Options(TrainOptions):
    """The options of a training run, and those that only the verbs have: how the model and the recipe are made."""

    set: Annotated[Several[str], arg(metavar="FIELD=VALUE")] = ()
    """recipe fields to change, for example lr=1e-4 epochs=5"""
    fresh: Annotated[Maybe[tuple[str, ...]], arg(metavar="[OPTION=VALUE ...]")] = None
    """start from random weights, with timm's options for the model, for example img_size=64 depth=6"""
    weights: Weights = None
    dry_run: bool = False
    """print the recipe, parameter groups, steps, time and memory, without training"""


Train = Annotated[Options, Flat]


def retrofit(model: ModelArgument, options: Train, recipe: str = "distil") -> None:
    """Fine-tune a pretrained ViT for few off-grid tokens, for the same classes.

    The recipe distil needs no labels. cls-in1k and cls-in21k are the paper's and need labels.
    After an interruption the same command resumes.

    example: spot retrofit vit_tiny_patch16_224.augreg_in21k_ft_in1k --data images --out runs/tiny

    Args:
        recipe: distil, distil-sizes, distil-again, cls-in1k or cls-in21k
    """
    train(model, recipe, ("distil", "supervised"), options)


def pretrain(model: ModelArgument, options: Train, recipe: str = "mae-in1k") -> None:
    """Train a masked autoencoder (MAE) on off-grid windows, without labels. Only the encoder is kept.

    The paper retrofits MAE models in this way. With --fresh, training starts from random weights, and the recipe can
    also be a supervised one. A decoder in the file of --weights is trained further, as in the paper.
    After an interruption the same command resumes.

    example: spot pretrain vit_base_patch16_224.mae --data imagenet --out runs/mae --accumulate 64

    Args:
        recipe: mae-in1k or a supervised one
    """
    train(model, recipe, ("mae", "supervised"), options)


def finetune(model: ModelArgument, options: Train, recipe: str = "finetune-small") -> None:
    """Fine-tune a model on labelled images, with a new head for new classes.

    The names of the class folders are saved with the model. The guide is docs/training.md.

    example: spot finetune vit-ti --data photos --out runs/mine

    Args:
        recipe: finetune-small (for a few hundred images or more), mae-finetune (after spot pretrain), or another
            supervised recipe
    """
    train(model, recipe, ("supervised",), options, new_head=True)


def train(
    name: str,
    recipe_name: str,
    objectives: tuple[str, ...],
    options: Options,
    *,
    new_head: bool = False,
) -> None:
    """Load a model by name and train it, or with --dry-run only print the plan.

    objectives: the objectives of recipes that the verb accepts.
    new_head: replace the head with one for the data's classes.
    """
    from spot.models.checkpoints import has_decoder, read_weights
    from spot.models.family import Family
    from spot.models.loading import load_source
    from spot.processes import this_process
    from spot.training.new_weights import classifier_for_data, random_vit
    from spot.training.recipes import RECIPES, find_recipe, override, parse_assignments
    from spot.training.run import run

    recipe = find_recipe(recipe_name)
    if recipe.objective not in objectives:
        fitting = [other for other, each in RECIPES.items() if each.objective in objectives]
        hint = f"{recipe_name} is a {recipe.objective} recipe"
        raise unknown("recipe for this verb", recipe_name, fitting, hint=hint)
    recipe = override(recipe, parse_assignments(options.set, "a change of the recipe is FIELD=VALUE"))
    report.check_outputs(folder=options.out)
    teacher = decoder = None
    if options.fresh is None:
        source = load_source(name, weights=options.weights)
        if isinstance(source, Family):
            teacher = source.model(source.cells) if recipe.objective == "distil" else None
            model = source.model(source.min_tokens or 1)  # training starts from the whole change
        else:
            model = source
    else:
        given = parse_assignments(options.fresh, "--fresh takes timm's options as NAME=VALUE")
        model = random_vit(name, given, recipe.seed)
    if recipe.objective == "mae":
        state = {} if options.weights is None else read_weights(options.weights)
        decoder = state if has_decoder(state) else None
        if decoder is None and options.fresh is None and this_process().is_main_process:
            report.say(
                f"{options.weights or name} has no decoder, so training starts with a new one. The paper retrofits "
                "both: for that give the full checkpoint, such as mae_pretrain_vit_base_full.pth, as --weights."
            )
    if new_head:
        model = classifier_for_data(model, recipe, options)
    run(model, recipe, options, teacher, decoder=decoder, dry_run=options.dry_run)
    if this_process().is_main_process and not options.dry_run:
        report.say(f"The trained model is in {options.out / 'model'}")
