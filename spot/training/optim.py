"""Optimisers, layer-wise learning rates, and the steps of small training runs.

Retrofitting inverts the usual layer-wise decay (paper, appendix A): the embedding and the early blocks must adapt to
new tokens, while late blocks change little. The embedding uses the full learning rate, and block i uses llrd^i of it.
The final norm and the head use the full rate again.

Recipes for random weights use timm's Muon (Jordan et al., 2024) for matrices in the blocks, and AdamW for the rest.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from timm.optim import Muon
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import AdamW, Optimizer

from spot import report
from spot.store import read_state, write_state
from spot.training.recipes import Recipe

EMBEDDING = ("patch_embed", "pos_embed", "cls_token", "reg_token", "dist_token", "norm_pre", "rope")
EPS = 1e-8  # of the optimisers, as in the paper
IN_VIT = re.compile(r"(?:.*\.)?vit\.(blocks\.(\d+)\.)?(.*)")  # timm's parameter names, after any prefix


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Group a model's trainable parameters, and their names, by learning rate and weight decay.

    `scale` multiplies the recipe's rate. With the optimiser muon, groups with `use_muon` use Muon.
    """
    parts = [IN_VIT.fullmatch(name) for name, _ in model.named_parameters()]
    depth = len({part[2] for part in parts if part and part[2]})
    spared = {  # timm's no_weight_decay: the class token and the position table
        f"{prefix}.{name}" if prefix else name
        for prefix, part in model.named_modules()
        if hasattr(part, "no_weight_decay")
        for name in part.no_weight_decay()
    }
    groups: dict[tuple[float, float, bool], dict[str, Any]] = defaultdict(lambda: {"params": [], "names": []})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter.ndim <= 1 or name in spared else recipe.weight_decay
            use_muon = recipe.optimizer == "muon" and "blocks." in name and parameter.ndim == 2
            group = groups[rate_scale(name, recipe, depth), decay, use_muon]
            group["params"].append(parameter)
            group["names"].append(name)
    return [
        {**groups[key], "lr": recipe.lr * key[0], "scale": key[0], "weight_decay": key[1], "use_muon": key[2]}
        for key in sorted(groups, reverse=True)
    ]


def rate_scale(name: str, recipe: Recipe, depth: int) -> float:
    """A parameter's learning rate relative to the recipe's, by its layer in the ViT."""
    part = IN_VIT.fullmatch(name)
    if part is None:
        return 1.0  # a decoder
    if part[2] is None and not part[3].startswith(EMBEDDING):
        return recipe.head_rate
    layer = 0 if part[2] is None else int(part[2]) + 1
    return recipe.llrd ** (max(0, layer - 1) if recipe.faster == "early" else depth + 1 - layer)


def build_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """AdamW or Muon over the parameter groups."""
    groups = parameter_groups(model, recipe)
    if recipe.optimizer == "adamw":
        return AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=EPS, fused=True)
    for group in groups:
        group["nesterov"] = group["use_muon"]  # else timm uses NAdamW for the rest
    return Muon(groups, lr=recipe.lr, betas=recipe.betas, eps=EPS, ns_coefficients="original")


def learning_rate(recipe: Recipe, step: int, steps: int, warmup: int) -> float:
    """The learning rate at optimiser step 0 … steps − 1: warm-up over `warmup` steps, then cosine decay."""
    if step < warmup:
        share = (step + 1) / warmup
        if recipe.warmup_shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return recipe.warmup_lr + (recipe.lr - recipe.warmup_lr) * share
    share = (step - warmup) / max(1, steps - warmup)
    return recipe.lr * (1 + math.cos(math.pi * share)) / 2


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group to rate × scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


class Draws:
    """A random generator and other values that change during a small training run. They are saved with its state."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"generator": json.dumps(self.generator.bit_generator.state), "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state, self.values = json.loads(state["generator"]), state["values"]


def training_steps(
    steps: int,
    network: nn.Module,
    optimizer: Optimizer,
    title: str,
    *,
    clip: float | None = None,
    average: ModelEmaV3 | None = None,
    draws: Draws | None = None,
    file: Path | None = None,
    every: int = 20,
    warmup: int = 20,
) -> Iterator[int]:
    """The steps of a small training run: `for step in training_steps(…): loss_of(…).backward()`.

    Before a step it sets the learning rate (linear warm-up, then cosine decay) and clears the gradients. After the
    caller's backward pass it clips the gradients to the norm `clip`, and updates the weights and their `average`.
    The state, with that of `draws`, is saved to `file` every `every` steps. An interrupted run resumes from there, and
    ends with the same weights. The file is removed at the end.
    """
    rates, first = [group["lr"] for group in optimizer.param_groups], 0
    parts: dict[str, Any] = {"network": network, "optimizer": optimizer, "average": average, "draws": draws}
    parts = {name: part for name, part in parts.items() if part is not None}
    if file is not None and file.is_file():
        saved = read_state(file)
        first = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in report.track(range(first, steps), title, steps - first):
        share = min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        optimizer.zero_grad()
        yield step
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        if average is not None:
            average.update(network)
        if file is not None and (step + 1) % every == 0:
            write_state(file, {"step": step + 1, **{name: part.state_dict() for name, part in parts.items()}})
    if file is not None:
        file.unlink(missing_ok=True)
