"""spot.load: load a model by name or path.

This module resolves names. File formats are in checkpoints.py, weights by budget in family.py.
"""

from pathlib import Path
from typing import Any

import timm

from spot.data.scenes import CLASSES
from spot.errors import InputError, check_kind, unknown
from spot.models.checkpoints import (
    HUB_OPTIONS,
    build,
    load_authors,
    load_pretrained,
    load_saved,
    load_timm,
    read_saved,
    with_options,
)
from spot.models.family import DEFAULT_TOKENS, Family, Source, at_budget, hash_weights, is_delta, read_delta
from spot.models.shipped import ALIASES, built_in, find
from spot.models.spot_vit import SpotViT, adapt
from spot.placement.policy import Policy, is_policy_file, read_policy_file
from spot.placement.priors import AnyPrior
from spot.placement.sizes import Scale

WEIGHTS_FILES = (".safetensors", ".pth", ".pt", ".bin")


def load(
    name: str | Path,
    *,
    tokens: int | None = None,
    prior: AnyPrior | None = None,
    scale: Scale | None = None,
    weights: str | Path | None = None,
    pretrained: bool = True,
    **options: Any,
) -> SpotViT:
    """Load a model by name or path, as an ordinary module with one set of weights.

    A shipped retrofit has weights for every budget (`spot.Family`). It is loaded with the weights for `tokens`, by
    default 49. That is a quarter of the grid, and keeps most of the accuracy at less than a quarter of the cost.

    Args:
        name: a built-in model, a folder or file that SPoT saved, a hub id, a timm name (its pretrained
            ViT, adapted), or the authors' published .pth file.
        tokens, prior, scale: the model's placement; by default as saved. A prior may be the file of a policy.
        weights: a file with the timm model's weights, instead of a download.
        pretrained: False gives random weights, and needs neither a download nor `weights`.
        options: options of timm.create_model, such as num_classes or img_size; for a hub id also revision, token, …
    """
    source = load_source(name, weights=weights, **options) if pretrained else untrained(str(name), options)
    return at_budget(source, tokens, prior=read_prior(prior, source), scale=scale).eval()


def load_source(
    name: str | Path, *, weights: str | Path | None = None, scale: Scale | None = None, **options: Any
) -> Source:
    """Load a source of models by budget: a Family for a retrofit with a known base, else one SpotViT.

    scale: of the windows that its models place; by default as saved.
    """
    check_kind("a model's name", name, str, Path)
    check_kind("weights", weights, str, Path, type(None))
    path, name = find(name), str(name)
    source: Source
    if is_delta(path):
        source = Family(name, weights=weights, **options)
    elif path.exists():
        if weights is not None:
            raise InputError(f"{path} already holds weights; weights={weights} goes with a timm name")
        model = load_saved(path) if path.is_dir() or path.suffix == ".safetensors" else load_authors(path)
        if name in built_in():  # trained on scenes
            model.class_names = CLASSES
        source = with_options(model, options).eval()
    elif path.suffix in WEIGHTS_FILES:
        raise InputError(f"there is no file {path}")
    elif is_timm(name):
        source = load_timm(name.removeprefix("timm/"), weights, options).eval()
    elif name.count("/") == 1:
        hub = {key: options.pop(key) for key in HUB_OPTIONS if key in options}
        source = with_options(load_pretrained(name, **hub), options).eval()
    else:
        raise unknown_model(name)
    if scale is not None:
        source.scale = scale
    return source


def untrained(name: str, options: dict[str, Any]) -> SpotViT:
    """A model of this name with random weights: nothing is downloaded."""
    path = find(name)
    if is_delta(path):
        _, about = read_delta(path)
        model = adapt(about["base"], **options)
        model.scale = about["config"].get("scale")
        return model.at(tokens=min(DEFAULT_TOKENS, len(model.grid())))
    if path.exists():
        _, config = read_saved(path)
        return build({**config, "options": {**config["options"], **options}})
    if is_timm(name) and ":" not in name:  # whose configuration would be downloaded
        return adapt(name.removeprefix("timm/"), **options)
    raise unknown_model(name)


def is_timm(name: str) -> bool:
    """Whether this is a name for timm.create_model, with or without a tag."""
    return ":" in name or (timm.is_model(name.removeprefix("timm/").split(".")[0]) and not name.endswith("+spot"))


def unknown_model(name: str) -> InputError:
    """The error for an unknown name, with the most similar names."""
    timms = [*timm.list_models(module="vision_transformer"), *timm.list_models(module="eva")]
    beginnings = [model for model in built_in() if model.startswith(name.partition("+")[0])]  # of deit_tiny+spot
    return unknown("model", name, beginnings or [*built_in(), *ALIASES, *timms], hint="spot.list_models() lists ours")


def read_prior(prior: AnyPrior | None, source: Source) -> AnyPrior | None:
    """The prior, or the policy if it is the name of a file."""
    return load_policy(str(prior), source) if is_policy_file(prior) else prior


def load_policy(path: str | Path, source: Source) -> Policy:
    """A policy from the file that `spot learn` wrote; refuses one that was trained for other weights."""
    policy, weights = read_policy_file(path, source.patch_size), hash_weights(source)
    if policy.about["hash"] != weights:
        raise InputError(
            f"{path} is a policy for {policy.about['model']} (weights {policy.about['hash']}), but this model is "
            f"{source.name} (weights {weights}); train one for it with spot learn"
        )
    return policy
