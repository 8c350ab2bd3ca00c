"""Retrofits as deltas: what training added to a named timm checkpoint.

A delta is a safetensors file. Its header says on which base it stands (timm's name and a hash of
the base's tensors) and how the model places tokens; on any other base it is refused. Tensors that
did not change are left out. The others are kept, at the writer's choice, as float16, as int8 with
a scale per row, or as a low-rank product:

    name            float16, or int8 with `name|scale` (rows, 1) float32
    name|left       (rows, rank) float16, and `name|right` (rank, columns): their product
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from spot.errors import InputError, unknown
from spot.store import whole

KEY, FORMAT = "spot_delta", 1
Method = Literal["float16", "int8", "low-rank"]
SCALE, LEFT, RIGHT = "|scale", "|left", "|right"


def save_delta(
    model: nn.Module,
    base_state: Mapping[str, Tensor],
    path: str | Path,
    *,
    base: str,
    method: Method = "int8",
    rank: int = 16,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write what `model.vit` has more than its base.

    Args:
        model: a SpotViT.
        base_state: the base's tensors under timm's names.
        base: timm's name of the base, with its tag.
        method: float16, int8 (a quarter of float32's size), or low-rank (for matrices; vectors as float16).
        rank: of the product, for low-rank.
        config: JSON values to keep with it, such as tokens and prior.
    """
    if method not in get_args(Method):
        raise unknown("way to keep a delta", method, get_args(Method))
    state = model.vit.state_dict()  # type: ignore[union-attr]
    refuse_misfit(state, base_state)
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        change = tensor.detach().cpu().float() - base_state[name].cpu().float()
        if change.any():
            kept |= pack(name, change, method, rank)
    about = {"format": FORMAT, "base": base, "hash": tensor_hash(base_state), "method": method, "config": config or {}}
    with whole(path) as temporary:
        save_file(kept, temporary, metadata={KEY: json.dumps(about)})


def pack(name: str, change: Tensor, method: Method, rank: int) -> dict[str, Tensor]:
    """A change as it is kept. Vectors (and tokens, which are vectors too) are float16 always."""
    matrix = change.flatten(1) if change.ndim > 1 else change[None]
    if method == "float16" or min(matrix.shape) == 1:
        return {name: change.half()}
    if method == "low-rank":
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        rank = min(rank, len(values))
        root = values[:rank].sqrt()
        return {
            name + LEFT: (left[:, :rank] * root).half().contiguous(),
            name + RIGHT: (root[:, None] * right[:rank]).half().contiguous(),
        }
    scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return {name: (matrix / scale).round().to(torch.int8).view(change.shape).contiguous(), name + SCALE: scale}


def is_delta(path: str | Path) -> bool:
    """Whether a file is a delta; a damaged file is not."""
    try:
        with safe_open(path, framework="pt") as file:
            return KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def read_about(path: str | Path) -> dict[str, Any]:
    """What a delta says of itself: base, hash, method and config."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a readable safetensors file; it may be cut short: {error}") from error
    if KEY not in metadata:
        raise InputError(f"{path} is not a delta; it has no {KEY} in its header")
    about = json.loads(metadata[KEY])
    if about.get("format") != FORMAT:
        raise InputError(f"{path} is a delta in format {about.get('format')!r}; this version reads {FORMAT}")
    return about


def apply_delta(base_state: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Base plus delta: all tensors under timm's names. Refuses any other base than the delta's own."""
    about = read_about(path)
    found = tensor_hash(base_state)
    if found != about["hash"]:
        raise InputError(
            f"{Path(path).name} is a delta on {about['base']} (tensors {about['hash']}), "
            f"but these weights are others ({found}); give that checkpoint's weights"
        )
    state = {name: tensor.clone() for name, tensor in base_state.items()}
    with safe_open(path, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in kept.items():
        owner, bar, _ = name.partition("|")
        if bar and not name.endswith(LEFT):
            continue  # read with its partner
        shape = state[owner].shape
        if name.endswith(LEFT):
            change = tensor.float() @ kept[owner + RIGHT].float()
        elif name + SCALE in kept:
            change = tensor.float().view(len(tensor), -1) * kept[name + SCALE]
        else:
            change = tensor.float()
        state[owner] = (state[owner].float() + change.view(shape)).to(state[owner].dtype)
    return state


def tensor_hash(state: Mapping[str, Tensor]) -> str:
    """A short hash of tensors by name, shape, type and value."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def refuse_misfit(state: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
    """Refuse a base of another architecture, naming the first tensor that differs."""
    for name in sorted(state.keys() | base.keys()):
        shapes = [tuple(each[name].shape) if name in each else None for each in (state, base)]
        if shapes[0] != shapes[1]:
            raise InputError(f"the base is of another architecture: {name} is {shapes[1]} there, {shapes[0]} here")
