"""Rates: which parameters learn how fast, and when.

Retrofitting turns the usual layer-wise rates round (paper, appendix A): the embedding and the
early blocks must learn to read new tokens, the late ones keep what they know. The embedding
learns at the full rate, block i at llrd^i of it, final norm and head at the full rate again.
"""

import math
import re
from collections import defaultdict
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from spot.training.muon import Muon
from spot.training.recipes import Recipe

EMBEDDING = ("patch_embed", "pos_embed", "cls_token", "reg_token", "dist_token", "norm_pre", "rope")
IN_VIT = re.compile(r"(?:.*\.)?vit\.(blocks\.(\d+)\.)?(.*)")  # timm's names, behind any prefix


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """A model's trainable parameters by rate and decay, as torch takes them, with their names.

    `scale` is what set_rate multiplies the recipe's rate with; Muon makes the steps of `orthogonal` groups so.
    """
    parts = [IN_VIT.fullmatch(name) for name, _ in model.named_parameters()]
    depth = len({part[2] for part in parts if part and part[2]})
    spared = {  # what timm says must not decay: the class token and the position table
        f"{prefix}.{name}" if prefix else name
        for prefix, part in model.named_modules()
        if hasattr(part, "no_weight_decay")
        for name in part.no_weight_decay()
    }
    groups: dict[tuple[float, float, bool], dict[str, Any]] = defaultdict(lambda: {"params": [], "names": []})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter.ndim <= 1 or name in spared else recipe.weight_decay
            orthogonal = recipe.optimizer == "muon" and "blocks." in name and parameter.ndim == 2
            group = groups[rate_scale(name, recipe, depth), decay, orthogonal]
            group["params"].append(parameter)
            group["names"].append(name)
    return [
        {**groups[key], "lr": recipe.lr * key[0], "scale": key[0], "weight_decay": key[1], "orthogonal": key[2]}
        for key in sorted(groups, reverse=True)
    ]


def rate_scale(name: str, recipe: Recipe, depth: int) -> float:
    """A parameter's share of the rate, by where in the ViT it is."""
    part = IN_VIT.fullmatch(name)
    if part is None:
        return 1.0  # a decoder
    if part[2] is None and not part[3].startswith(EMBEDDING):
        return recipe.head_rate
    layer = 0 if part[2] is None else int(part[2]) + 1
    return recipe.llrd ** (max(0, layer - 1) if recipe.faster == "early" else depth + 1 - layer)


def build_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """AdamW or Muon over the parameter groups that learn."""
    groups = [group for group in parameter_groups(model, recipe) if group["scale"] > 0]
    kind = {"adamw": AdamW, "muon": Muon}[recipe.optimizer]
    return kind(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)


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
