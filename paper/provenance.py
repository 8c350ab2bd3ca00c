"""The model files that a result was measured with. Results have their hashes; a test (tests/paper/test_provenance.py)
compares these with the shipped files.

A file is identified by hashes of the ViT's tensors (for a retrofit: the stored change) and of its policy's
tensors. Neither depends on the file's layout or on the rest of its header.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spot.hashes import hash_tensors
from spot.models.family import POLICY, is_delta, read_delta
from spot.models.shipped import find
from spot.store import read_tensors


def file_hashes(source: str | Path) -> dict[str, str]:
    """Hashes of a model's file: "file" of the ViT, and "policy" if it has one; empty for a name without a file."""
    path = find(source)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file() or path.suffix != ".safetensors":
        return {}
    parts: dict[str, dict[str, Any]] = {"file": {}, "policy": {}}
    for name, tensor in read_tensors(path)[0].items():
        parts["policy" if name.startswith(POLICY) else "file"][name] = tensor
    return {part: hash_tensors(tensors) for part, tensors in parts.items() if tensors}


def hashes_with_base(source: str | Path) -> dict[str, str]:
    """The same, and "base" of the ViT that a retrofit is based on."""
    path = find(source)
    return file_hashes(source) | ({"base": read_delta(path)[1]["hash"]} if is_delta(path) else {})


def sentence(settings: Mapping[str, Any]) -> str:
    """A sentence on a result's model files and command, for the end of its page."""
    models = [
        f"`{name}` ({', '.join(f'{part} {about[part]}' for part in ('file', 'policy') if about.get(part))})"
        for name, about in settings.get("models", {}).items()
        if about.get("file")
    ]
    made = [f"by `{settings['command']}`"] if settings.get("command") else []
    made += [f"{', '.join(each['only'])} by `{each['command']}`" for each in settings.get("added", [])]
    return f"Of {', '.join(models)}, {'; '.join(made)}".rstrip(", ") + "." if models else ""


def comment(models: Mapping[str, str | Path]) -> str:
    """The comment above a table that names these models' files."""
    parts = [
        " ".join([name, *(word for pair in hashes_with_base(source).items() for word in pair)])
        for name, source in models.items()
    ]
    return f"<!-- of: {', '.join(parts)} -->"
