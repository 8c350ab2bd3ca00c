"""The models that come with the package: names, files and measured accuracy. Imports nothing heavy.

assets/models.json has a row for each, written by the programs that make them (tools/make_assets.py and
tools/make_retrofits.py): its alias, the timm checkpoint it needs, its data, and top-1 in percent by number of tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spot.store import read_json, write_json

ASSETS = Path(__file__).parents[1] / "assets"
LIST = ASSETS / "models.json"
ALIASES = {
    "vit-ti": "vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot",
    "deit-ti": "deit_tiny_patch16_224.fb_in1k+spot",
}
CASCADE = ".cascade.json"  # a shipped cascade has the name of its model and this ending


def built_in() -> dict[str, Path]:
    """The models that come with the package: name → file."""
    return {path.stem: path for path in sorted(ASSETS.glob("*.safetensors"))}


def find(name: str | Path) -> Path:
    """The file of a built-in model, by name or alias; any other name is a path of its own."""
    return built_in().get(ALIASES.get(str(name), str(name)), Path(name))


def list_models() -> list[dict[str, Any]]:
    """A row for each model that `spot.load` knows by itself; it also takes any ViT of timm's.

    name and alias; needs, what has to be downloaded or given as weights=FILE; data, what its accuracy was
    measured on; accuracy, top-1 in percent by the number of tokens, with isotropic tokens; merged, the same with tokens
    merged at that cost, and cascade, that of the shipped cascade, where they were measured.
    """
    rows, known = [], read_json(LIST, "the list of models") if LIST.is_file() else {}
    for name in built_in():
        about = known.get(name, {})
        base = about.get("base")
        rows.append(
            {
                "name": name,
                "alias": about.get("alias", ""),
                "needs": f"the weights of {base}: a download, or weights=FILE" if base else "nothing",
                "data": about.get("data", ""),
                "accuracy": {int(tokens): top1 for tokens, top1 in about.get("accuracy", {}).items()},
                "merged": {int(tokens): top1 for tokens, top1 in about.get("merged", {}).items()},
                "cascade": about.get("cascade"),
            }
        )
    return rows


def record(name: str, accuracy: Mapping[int, float], data: str, base: str = "", path: Path = LIST) -> None:
    """Write a model's measured accuracy, top-1 in percent by tokens, into the list."""
    known = read_json(path, "the list of models") if path.is_file() else {}
    alias = next((alias for alias, full in ALIASES.items() if full == name), "")
    row = {"alias": alias, "base": base or None, "data": data}
    known[name] = {**known.get(name, {}), **row, "accuracy": {str(tokens): top1 for tokens, top1 in accuracy.items()}}
    write_json(path, known)
