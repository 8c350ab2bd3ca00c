"""The model files that a result was measured with. Results have their hashes; a test compares these with shipped files.

A file is identified by hashes of the ViT's tensors (for a retrofit: the stored change) and of its policy's
tensors. Neither depends on the file's layout or on the rest of its header.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spot.hashes import hash_tensors
from spot.models.deltas import POLICY, is_delta, read_about
from spot.models.shipped import ALIASES, built_in, find
from spot.store import read_tensors

USES_POLICY = ("learned", "merged-learned", "policy")  # in the names of rows that use a policy


def stored(source: str | Path) -> dict[str, str]:
    """Hashes of a model's file: "file" of the ViT, and "policy" if it has one; empty for a name without a file."""
    path = find(source)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file() or path.suffix != ".safetensors":
        return {}
    parts: dict[str, dict[str, Any]] = {"file": {}, "policy": {}}
    for name, tensor in read_tensors(path)[0].items():
        parts["policy" if name.startswith(POLICY) else "file"][name] = tensor
    return {part: hash_tensors(tensors) for part, tensors in parts.items() if tensors}


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


def stale(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Sentences on why a result does not match the shipped files; none if it does."""
    learned = any(word in str(value) for row in rows for value in row.values() for word in USES_POLICY)
    for name, about in settings.get("models", {}).items():
        source = ALIASES.get(about["source"], about["source"])
        if source not in built_in():
            continue
        for part, needed in stored(source).items():
            if about.get(part) != needed and (part == "file" or learned):
                yield f"{name}: measured with {part} {about.get(part)}, what ships has {needed}"


# Documents. A table is copied from a result (tools/fill_results.py), or a comment above it names its files:
#     <!-- of: vit-ti file 1f384a4d10ae4cb3 policy 80fc4d2598b0e9ed, deit-ti base 39292d92f61fd31d -->
# or explains why it is not about shipped files:
#     <!-- of no shipped file: training runs of the recipe, one seed each -->
BLOCK = re.compile(r"<!-- (?:accuracy: )?\S+\.(?:md|json)(?: [^>]*)?-->.*?<!-- end -->", re.DOTALL)
NAMED = re.compile(r"<!-- of: (.+?) -->")
REASON = re.compile(r"<!-- of no shipped file: \w.+? -->")
# A row in which two cells begin with a number that has decimals:
NUMBERS = re.compile(r"^(?:.*\|)?\s*[-+−]?\d+\.\d[^|\n]*\|(?:.*\|)?\s*[-+−]?\d+\.\d", re.MULTILINE)


def comment(models: Mapping[str, str | Path]) -> str:
    """The comment above a table that names these models' files; base is the ViT that a retrofit is based on."""
    parts = []
    for name, source in models.items():
        known = stored(source) | ({"base": read_about(find(source))["hash"]} if is_delta(find(source)) else {})
        parts.append(" ".join([name, *(word for pair in known.items() for word in pair)]))
    return f"<!-- of: {', '.join(parts)} -->"


def unproven(text: str) -> Iterator[str]:
    """Sentences on tables of measured numbers in a document that name no files, or files that are not shipped."""
    text = BLOCK.sub("", text)
    for named in NAMED.finditer(text):
        for model in named[1].split(","):
            name, *pairs = model.split()
            ships = stored(name) | ({"base": read_about(find(name))["hash"]} if is_delta(find(name)) else {})
            for part, given in zip(pairs[::2], pairs[1::2], strict=True):
                if ships.get(part) != given:
                    yield f"a table is of {name}'s {part} {given}; what ships has {ships.get(part)}"
    for table in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        above = text[: table.start()].rstrip().splitlines()[-3:]
        if NUMBERS.search(table[0]) and not any(NAMED.search(line) or REASON.search(line) for line in above):
            yield f"a table of numbers names no model files: {table[0].splitlines()[0]}"
