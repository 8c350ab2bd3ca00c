"""Retrofits as deltas: the difference between trained weights and a named timm checkpoint.

A delta is a safetensors file. Its header contains its base (timm's name and a hash of the base's tensors)
and the model's placement options. It cannot be applied to any other base. Unchanged tensors are left
out. Changes of matrices are stored as int8 with a scale per row, a quarter of float32's size:

    name            int8 with `name|scale` (rows, 1) float32; float16 for vectors
    policy.name     float32: the weights of the learned prior, if there is one
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spot.errors import InputError
from spot.hashes import hash_tensors
from spot.placement.policy import Policy, build_policy
from spot.store import has_kind, read_tensors, write_tensors

KEY, FORMAT = "spot_delta", 1
SCALE, POLICY = "|scale", "policy."


def save_delta(
    model: nn.Module,
    base_state: Mapping[str, Tensor],
    path: str | Path,
    *,
    base: str,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Save the difference between `model.vit` and its base, and the model's policy if it has one.

    Args:
        model: a SpotViT.
        base_state: the base's tensors under timm's names.
        base: timm's name of the base, with its tag.
        config: JSON values to store: prior, scale and min_tokens, the budget at which the full change is applied.
    """
    state = model.vit.state_dict()  # type: ignore[union-attr]
    refuse_misfit("the base", base_state, state)
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        change = tensor.detach().cpu().float() - base_state[name].cpu().float()
        if change.any():
            stored |= pack(name, change)
    config = dict(config or {})
    policy = getattr(model, "policy", None)
    if isinstance(policy, Policy):
        config["policy"] = policy.describe()
        stored |= {POLICY + name: tensor for name, tensor in policy.state_dict().items()}
    about = {"format": FORMAT, "base": base, "hash": hash_tensors(base_state), "config": config}
    write_tensors(path, stored, KEY, about)


def pack(name: str, change: Tensor) -> dict[str, Tensor]:
    """A change in its stored form. Vectors, including tokens, are float16."""
    matrix = change.flatten(1) if change.ndim > 1 else change[None]
    if min(matrix.shape) == 1:
        return {name: change.half()}
    scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return {name: (matrix / scale).round().to(torch.int8).view(change.shape).contiguous(), name + SCALE: scale}


def is_delta(path: str | Path) -> bool:
    """Whether a file is a delta; a damaged file is not."""
    return has_kind(path, KEY)


def read_delta(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The stored tensors of a delta, and its header: base, hash and config."""
    stored, about = read_tensors(path, KEY, "a delta")
    if about.get("format") != FORMAT:
        raise InputError(f"{path} is a delta in format {about.get('format')!r}; this version reads {FORMAT}")
    if not (isinstance(about.get("base"), str) and "hash" in about and isinstance(about.get("config"), dict)):
        raise InputError(f"{path} is a damaged delta: its header names no base, or no configuration")
    return stored, about


def apply_delta(base_state: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Base plus delta: all tensors under timm's names. Refuses bases other than the delta's own."""
    stored, about = read_delta(path)
    base = hash_tensors(base_state)
    if base != about["hash"]:
        raise InputError(
            f"{Path(path).name} is a delta on {about['base']} (tensors {about['hash']}), "
            f"but these weights are others ({base}); give that checkpoint's weights"
        )
    state = {name: tensor.clone() for name, tensor in base_state.items()}
    for name, change in stored.items():
        if name.endswith(SCALE) or name.startswith(POLICY):
            continue  # scales are read with their tensor; policies are not part of the ViT
        if name not in state or change.numel() != state[name].numel():
            raise InputError(f"{path} is a damaged delta: {name} does not fit its base")
        change = change.float()
        if name + SCALE in stored:
            scale = stored[name + SCALE]
            if not change.ndim or scale.shape != (len(change), 1):
                raise InputError(f"{path} is a damaged delta: the scale of {name} does not fit it")
            change = change.view(len(change), -1) * scale
        state[name] = (state[name].float() + change.view(state[name].shape)).to(state[name].dtype)
    return state


def delta_policy(path: str | Path) -> Policy | None:
    """The policy in a delta's file, or None."""
    stored, about = read_delta(path)
    description = about["config"].get("policy")
    if description is None:
        return None
    state = {name.removeprefix(POLICY): tensor for name, tensor in stored.items() if name.startswith(POLICY)}
    return build_policy(description, state, str(path))


def refuse_misfit(source: str, state: Mapping[str, Tensor], model_state: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit a model's architecture, naming the first tensor that differs."""
    for name in sorted(model_state.keys() | state.keys()):
        given, needed = (tuple(each[name].shape) if name in each else None for each in (state, model_state))
        if given != needed:
            difference = f"has shape {given}, the model needs {needed}"
            difference = "is missing" if given is None else "is not in the model" if needed is None else difference
            raise InputError(f"{source} is of another architecture: {name} {difference}")
