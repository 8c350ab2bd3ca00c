"""A run as the verbs retrofit, pretrain and finetune begin it: recipe and model by name, and the dry run's tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spot import report
from spot.errors import InputError, unknown
from spot.models.checkpoints import load
from spot.processes import this_process
from spot.training.classifier import for_data
from spot.training.fresh import fresh, read_options
from spot.training.options import Options
from spot.training.recipes import DESCRIPTIVE, RECIPES, Recipe, find_recipe, override
from spot.training.run import dry_run, run


def begin(
    name: str,
    recipe_name: str,
    objectives: Sequence[str],
    options: Options,
    *,
    changes: Sequence[str] = (),
    new: Sequence[str] | None = None,
    weights: Path | None = None,
    new_head: bool = False,
    classes: int | None = None,
    dry: bool = False,
    json: Path | None = None,
) -> None:
    """Train a model.

    Args:
        objectives: those of the recipes that the verb takes.
        changes: FIELD=VALUE of the recipe.
        new: start from new weights, with these OPTION=VALUE of timm's.
        weights: a file with the timm model's weights.
        new_head: for the data's classes, or as many as `classes` says.
        dry: show what would be done, and train nothing; `json` is a file for that.
    """
    recipe = chosen(recipe_name, objectives, changes)
    report.check_outputs(json, folder=options.out)
    model = load(name, weights=weights) if new is None else fresh(name, read_options(new), recipe.seed)
    if new_head:
        model = for_data(model, recipe, options, classes)
    if not dry:
        run(model, recipe, options)
        if this_process().is_main_process:
            report.say(f"The trained model is in {options.out / 'model'}")
        return
    plan = dry_run(model, recipe, options)
    if this_process().is_main_process:
        show_plan(plan)
        if json is not None:
            report.save_json(json, plan.pop("groups"), plan)


def chosen(name: str, objectives: Sequence[str], changes: Sequence[str]) -> Recipe:
    """The recipe of a name, if the verb takes it, with changes."""
    recipe = find_recipe(name)
    if recipe.objective not in objectives:
        fitting = [other for other, each in RECIPES.items() if each.objective in objectives]
        raise unknown("recipe for this verb", name, fitting, hint=f"{name} is a {recipe.objective} recipe")
    pairs = {}
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals:
            raise InputError(f"a change of the recipe is FIELD=VALUE, got {change!r}")
        pairs[field] = value
    return override(recipe, pairs)


def show_plan(plan: dict[str, Any]) -> None:
    """The dry run as tables."""
    recipe = plan["recipe"]
    values = [{"field": key, "value": str(value)} for key, value in recipe.items() if key not in DESCRIPTIVE]
    report.show(values, f"recipe {recipe['name']}: {recipe['origin']}")
    rows = [{**group, "rate": f"{group['rate']:.2e}"} for group in plan["groups"]]
    report.show(rows, "parameter groups", digits=4)
    report.say(
        f"{plan['steps']} steps over {plan['images']} images, {plan['seconds_per_step']:.2f} s each: "
        f"{plan['hours']:.2f} hours; {plan['memory_gb']:.2f} GB"
    )
