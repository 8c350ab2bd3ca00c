"""Content hashes, as sixteen hexadecimal digits."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing torch takes a second, too long for a command's --help
    from torch import Tensor, nn


def hash_tensors(tensors: Mapping[str, "Tensor"], *others: Any) -> str:
    """Hash the names, shapes, types and values of tensors, and `others` (as JSON)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor_bytes(tensor))
    if others:
        digest.update(json.dumps(others, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def hash_model(model: "nn.Module") -> str:
    """Hash the weights, buffers, kernel widths and window scale of a model.

    A learned prior is not included: like any other prior, it only places tokens.
    """
    widths = {name: getattr(part, "sigma", None) for name, part in model.named_modules()}
    others = [{name: width for name, width in widths.items() if width is not None}]
    scale = getattr(model, "scale", None)  # window scale: a number or "auto"
    scales = [scale] if isinstance(scale, (str, int, float)) else []
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("policy.")}
    return hash_tensors(state, *others, *scales)


def hash_file(path: str | Path) -> str:
    """Hash a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def hash_json(data: Any) -> str:
    """Hash JSON data. The order of keys has no effect."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def tensor_bytes(tensor: "Tensor") -> Any:
    """A tensor's memory as an array of bytes; a contiguous tensor on the CPU is not copied."""
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
