"""Rates: which parameters learn how fast, and when.

Retrofitting turns the usual layer-wise rates round (paper, appendix A): the embedding and the
early blocks must learn to read new tokens, the late ones keep what they know. The embedding
learns at the full rate, block i at llrd^i of it, final norm and head at the full rate again.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from spot.training.muon import Muon
from spot.training.recipes import Recipe

EMBEDDING = ("patch_embed", "pos_embed", "cls_token", "reg_token", "dist_token", "norm_pre", "rope")


@dataclass(frozen=True)
class Group:
    """Parameters that share a rate and a weight decay."""

    scale: float  # times the recipe's rate
    weight_decay: float
    names: tuple[str, ...]


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[Group]:
    """Trainable parameters of a model holding timm's names (behind any prefix ending in `vit.`), by rate and decay."""
    depth = 1 + max((block_of(name) for name, _ in model.named_parameters()), default=-1)
    spared = undecayed(model)
    groups: dict[tuple[float, float], list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = 0.0 if parameter.ndim <= 1 or name in spared else recipe.weight_decay
        groups[rate_scale(name, recipe, depth), decay].append(name)
    ordered = sorted(groups.items(), key=lambda item: (-item[0][0], -item[0][1]))
    return [Group(scale, decay, tuple(names)) for (scale, decay), names in ordered]


def block_of(name: str) -> int:
    """The number of the ViT block a parameter belongs to, or -1."""
    _, inside, rest = name.rpartition("vit.")
    parts = rest.split(".")
    return int(parts[1]) if inside and parts[0] == "blocks" else -1


def undecayed(model: nn.Module) -> set[str]:
    """Full names of what timm says must not decay: the class token and the position table."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in model.named_modules()
        if hasattr(part, "no_weight_decay")
        for name in part.no_weight_decay()
    }


def rate_scale(name: str, recipe: Recipe, depth: int) -> float:
    """A parameter's share of the rate, by where in the ViT it is."""
    _, in_vit, rest = name.rpartition("vit.")
    if not in_vit:
        return 1.0  # a decoder
    block = block_of(name)
    if recipe.faster == "early":
        if block >= 0:
            return recipe.llrd**block
        return 1.0 if rest.startswith(EMBEDDING) else recipe.head_rate
    if block >= 0:
        return recipe.llrd ** (depth - block)
    return recipe.llrd ** (depth + 1) if rest.startswith(EMBEDDING) else recipe.head_rate


def build_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """AdamW or Muon over the parameter groups; each remembers its scale for set_rate."""
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {
            "params": [parameters[name] for name in group.names],
            "scale": group.scale,
            "weight_decay": group.weight_decay,
            "lr": recipe.lr * group.scale,
        }
        for group in parameter_groups(model, recipe)
        if group.scale > 0
    ]
    options: dict[str, Any] = {"lr": recipe.lr, "betas": recipe.betas, "eps": recipe.eps, "fused": True}
    if recipe.optimizer == "adamw":
        return AdamW(groups, **options)
    inside = {id(parameter) for name, parameter in parameters.items() if "blocks." in name and parameter.ndim == 2}
    divided = [
        {**group, "params": chosen, "orthogonal": orthogonal}
        for group in groups
        for orthogonal in (True, False)
        if (chosen := [each for each in group["params"] if (id(each) in inside) is orthogonal])
    ]
    return Muon(divided, **options)


def learning_rate(recipe: Recipe, step: int, steps: int, warmup: int) -> float:
    """The full rate at optimiser step 0 … steps − 1: warm-up over `warmup` steps, then cosine decay."""
    if step < warmup:
        share = (step + 1) / warmup
        if recipe.warmup_shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return recipe.warmup_lr + (recipe.lr - recipe.warmup_lr) * share
    share = (step - warmup) / max(1, steps - warmup)
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * share)) / 2


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every group its share of the full rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
