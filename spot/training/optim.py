"""Rates: which parameters learn how fast, and when.

Retrofitting turns the usual layer-wise rates round (paper, appendix A): the embedding and the
early blocks must learn to read new tokens, the late ones keep what they know. The embedding
learns at the full rate, block i at llrd^i of it, final norm and head at the full rate again.

Recipes that begin with new weights use Muon (Jordan et al., 2024): momentum made orthogonal for the matrices inside
the blocks, AdamW for all else. On 256 scenes a nano ViT has 61 % right after 192 steps with it, 31 % with AdamW (rate
1e-3). timm has a Muon too, which iterates in bfloat16 one matrix at a time: a quarter of such a step on a CPU.
"""

import math
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

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


MOMENTUM = 0.95
QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: five rounds bring every singular value to about 0.7 … 1.2
ROUNDS = 5


class Muon(AdamW):
    """AdamW in which groups with `orthogonal: True` hold matrices and take orthogonal steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            if group.get("orthogonal"):
                self.orthogonal_step(group)
        return super().step(closure)

    def orthogonal_step(self, group: dict[str, Any]) -> None:
        """One step of a group's matrices, those of one shape together."""
        alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in group["params"]:
            if matrix.grad is not None:
                alike[matrix.shape].append(matrix)
        for shape, matrices in alike.items():
            directions = []
            for matrix in matrices:
                gradient: Any = matrix.grad
                matrix.grad = None  # AdamW leaves it alone
                state = self.state[matrix]
                if not state:
                    state["step"] = torch.zeros(())  # AdamW looks for one when a state is loaded
                    state["momentum"] = torch.zeros_like(matrix)
                momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
                directions.append(gradient.lerp(momentum, MOMENTUM))  # Nesterov's look ahead
            # Scaled so that a step is as long as AdamW's would be (Liu et al., 2025).
            length = group["lr"] * 0.2 * max(shape) ** 0.5
            for matrix, direction in zip(matrices, orthogonal(torch.stack(directions)), strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-length)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices (n, rows, columns) with all singular values about 1, by Newton–Schulz iteration."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonal(matrices.mT).mT
    a, b, c = QUINTIC
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + torch.baddbmm(square, square, square, beta=b, alpha=c) @ x
    return x
