"""The models that come with the package: what they are called, what they need, how accurate they are."""

import re
from pathlib import Path
from typing import Any

from spot.models.checkpoints import built_in
from spot.models.deltas import is_delta, read_about
from spot.models.reach import ALIASES

CARDS = ("README.md", "NEEDLE.md", "RETROFITS.md")  # beside the models: written by the programs that make them


def list_models() -> list[dict[str, Any]]:
    """A row for each model that `spot.load` knows by itself; beside these it takes any ViT of timm's.

    name and alias; needs, what has to be downloaded or given as weights=FILE; data, what its accuracy was
    measured on; accuracy, top-1 in percent by the number of tokens, with isotropic tokens.
    """
    aliases = {name: alias for alias, name in ALIASES.items()}
    rows = []
    for name, path in built_in().items():
        base = read_about(path)["base"] if is_delta(path) else None
        rows.append(
            {
                "name": name,
                "alias": aliases.get(name, ""),
                "needs": "nothing" if base is None else f"the weights of {base}: a download, or weights=FILE",
                "data": "scenes" if base is None else "ImageNet",
                "accuracy": measured(path.parent).get(name, {}),
            }
        )
    return rows


def measured(folder: Path) -> dict[str, dict[int, float]]:
    """Model → tokens → top-1 in percent with isotropic tokens, from the tables of the model cards."""
    accuracy: dict[str, dict[int, float]] = {}
    for card in CARDS:
        head: list[str] = []
        for line in (folder / card).read_text().splitlines() if (folder / card).is_file() else ():
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            head = cells if cells[0] == "model" else head
            row = dict(zip(head, cells, strict=True)) if 1 < len(cells) == len(head) else {}
            for column, cell in row.items() if row.get("prior", "isotropic") == "isotropic" else ():
                tokens = re.fullmatch(r"isotropic (\d+)|(\d+) tokens", column)
                if tokens and re.fullmatch(r"[\d.]+", cell):
                    accuracy.setdefault(row["model"], {})[int(tokens[1] or tokens[2])] = float(cell)
    return accuracy
