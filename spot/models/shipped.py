"""The models included in the package: names, files and measured accuracy. Imports no heavy modules.

assets/models.json has a row for each, written by tools/make_assets.py and tools/make_retrofits.py: its
alias, the timm checkpoint it needs, its data, and top-1 accuracy in percent by number of tokens.
"""

from pathlib import Path
from typing import Any

from spot.store import read_json

ASSETS = Path(__file__).parents[1] / "assets"
LIST = ASSETS / "models.json"
ALIASES = {
    "vit-ti": "vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot",
    "deit-ti": "deit_tiny_patch16_224.fb_in1k+spot",
}
CASCADE = ".cascade.json"  # suffix of a shipped cascade, after the name of its model


def built_in() -> dict[str, Path]:
    """The models included in the package: name → file."""
    return {path.stem: path for path in sorted(ASSETS.glob("*.safetensors"))}


def find(name: str | Path) -> Path:
    """The file of a built-in model, by name or alias; any other name is returned as a path."""
    return built_in().get(ALIASES.get(str(name), str(name)), Path(name))


def list_models() -> list[dict[str, Any]]:
    """A row for each built-in model of `spot.load`, which also accepts timm's ViTs.

    name and alias; needs: weights to download or to give as weights=FILE; data: the images that accuracy was measured
    on; accuracy: top-1 in percent by number of tokens, with isotropic tokens. If measured, merged: the same with
    tokens merged at that cost; and cascade: results of the shipped cascade.
    """
    rows, entries = [], read_json(LIST, "the list of models")
    for name in built_in():
        about = entries.get(name, {})
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
