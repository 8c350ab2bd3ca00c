"""What retrofit, pretrain and finetune share: options, recipe and model from words, the dry run's tables."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from spot import report
from spot.errors import InputError, unknown
from spot.training.options import Options
from spot.training.recipes import DESCRIPTIVE, RECIPES, Recipe, find_recipe, override


@dataclass(frozen=True, kw_only=True)
class CommandOptions(Options):
    """A training verb's options."""

    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE")] = ()
    """recipe fields to change, such as lr=1e-4 epochs=5"""
    fresh: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[OPTION=VALUE ...]")] = None
    """start from new weights, with timm's options for the model, such as img_size=64 depth=6"""
    weights: Path | None = None
    """a file with the timm model's weights, instead of downloading them"""
    dry_run: bool = False
    """show recipe, parameter groups, steps, time and memory; train nothing"""
    json: Path | None = None
    """write what the dry run found to this file"""


def begin(
    name: str,
    recipe_name: str,
    objectives: Sequence[str],
    options: CommandOptions,
    *,
    new_head: bool = False,
    classes: int | None = None,
) -> None:
    """Run a training verb; with new_head the model gets one for the data's classes."""
    recipe = chosen(recipe_name, objectives, options.set)
    import spot
    from spot.processes import this_process
    from spot.training.classifier import for_data
    from spot.training.fresh import fresh, read_options
    from spot.training.run import dry_run, run

    if options.fresh is None:
        model = spot.load(name, weights=options.weights)
    else:
        model = fresh(name, read_options(options.fresh), recipe.seed)
    own = {field.name: getattr(options, field.name) for field in fields(Options)}
    if new_head:
        model = for_data(model, recipe, Options(**own), classes)
    if not options.dry_run:
        run(model, recipe, Options(**own))
        if this_process().is_main_process:
            report.console.print(f"The trained model is in {options.out / 'model'}")
        return
    plan = dry_run(model, recipe, Options(**own))
    if not this_process().is_main_process:
        return
    show_plan(plan)
    if options.json is not None:
        report.save_json(options.json, plan.pop("groups"), plan)


def chosen(name: str, objectives: Sequence[str], changes: Sequence[str]) -> Recipe:
    """The recipe of a name, if the verb takes it, with the changes of `--set`."""
    recipe = find_recipe(name)
    if recipe.objective not in objectives:
        fitting = [other for other, each in RECIPES.items() if each.objective in objectives]
        raise unknown("recipe for this verb", name, fitting, hint=f"{name} is a {recipe.objective} recipe")
    pairs = {}
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals:
            raise InputError(f"--set needs FIELD=VALUE, got {change!r}")
        pairs[field] = value
    return override(recipe, pairs)


def show_plan(plan: dict[str, Any]) -> None:
    """The dry run as tables."""
    recipe = plan["recipe"]
    values = [{"field": key, "value": str(value)} for key, value in recipe.items() if key not in DESCRIPTIVE]
    report.show(values, f"recipe {recipe['name']}: {recipe['origin']}")
    rows = [{**group, "rate": f"{group['rate']:.2e}"} for group in plan["groups"]]
    report.show(rows, "parameter groups", digits=4)
    report.console.print(
        f"{plan['steps']} steps over {plan['images']} images, {plan['seconds_per_step']:.2f} s each: "
        f"{plan['hours']:.2f} hours; {plan['memory_gb']:.2f} GB"
    )
