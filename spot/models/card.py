"""The model card that the hub shows: what a model is, how to use it, and what was measured of it.

Results are the rows that `spot evaluate --json FILE` writes; nothing in a card is typed by hand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spot import report
from spot.errors import InputError
from spot.hashes import hash_model
from spot.placement.priors import resolve_prior
from spot.store import read_json

if TYPE_CHECKING:
    from spot.models.spot_vit import SpotViT

PAPER = "https://openreview.net/forum?id=XrBzSmzAVo"
NEEDED = ("placement", "tokens", "top1", "low", "high", "images")


def card(model: "SpotViT", name: str = "", results: Mapping[str, Any] | None = None, licence: str = "") -> str:
    """A card in Markdown, with the hub's YAML in front.

    Args:
        name: what spot.load takes, by default the model's own name.
        results: what `read_results` gives.
        licence: of the weights; by default what timm says of them, and else that it is not known.
    """
    name = name or model.name
    config = getattr(model.vit, "pretrained_cfg", None) or {}
    licence = licence or config.get("license") or ""
    front = {"library_name": "spot-vit", "pipeline_tag": "image-classification", "base_model": config.get("hf_hub_id")}
    lines = ["---", *(f"{key}: {value}" for key, value in front.items() if value)]
    lines += [f"license: {licence}"] if licence else []
    lines += ["tags:", "- vision-transformer", "- token-placement", "- timm", "---", "", f"# {name}", ""]
    height, width = model.img_size
    lines += [
        f"A {model.name} whose tokens can be placed anywhere in an image ([SPoT]({PAPER})): {height} × {width} pixels, "
        f"windows of {model.patch_size}, {model.num_classes} classes. Its own placement is "
        f"{resolve_prior(model.prior).name} with {model.tokens} tokens; any other is an argument.",
        "",
        "```python",
        "import spot",
        "",
        f'model = spot.load("{name}")',
        "logits = model(images, tokens=49)",
        "```",
        "",
        "## Results",
        "",
    ]
    lines += result_lines(results) if results else ["Nothing has been measured for this card."]
    lines += ["", "## Licence", ""]
    lines += [f"Weights: {licence or 'as their base model, which does not say here'}. Code: Apache-2.0."]
    lines += ["", f"Weights {hash_model(model)}, spot-vit {report.versions()['spot-vit']}."]
    return "\n".join(lines) + "\n"


def result_lines(results: Mapping[str, Any]) -> list[str]:
    """The table, what it was measured on, and the command that measured it."""
    asked = results["settings"].get("arguments", {})
    rows = [
        {
            "placement": row["placement"],
            "tokens": row["tokens"],
            "top-1 %": f"{row['top1']:.2f}",
            "95 %": f"{row['low']:.2f} to {row['high']:.2f}",
            "images": row["images"],
        }
        for row in results["rows"]
    ]
    data = asked.get("data") if isinstance(asked, Mapping) else None
    about = f"Top-1 accuracy with its 95 % interval{f' on {data}' if data else ''}, by `spot evaluate`:"
    return [about, "", report.markdown(rows).rstrip()]


def read_results(path: str | Path, model: "SpotViT") -> dict[str, Any]:
    """What `spot evaluate --json` wrote of this model; another's is refused."""
    results = read_json(path, "a result of spot evaluate --json")
    rows: Sequence[Any] = results.get("rows", []) if isinstance(results, dict) else []
    if not rows or any(not isinstance(row, dict) or set(NEEDED) - set(row) for row in rows):
        raise InputError(f"{path} is not a result of spot evaluate --json: rows with {', '.join(NEEDED)} are needed")
    measured = results.get("settings", {}).get("weights")
    if measured not in (None, hash_model(model)):
        raise InputError(f"{path} was measured of other weights ({measured}) than the card's ({hash_model(model)})")
    return results
