"""The model card that `save_pretrained` and `push_to_hub` write: a description of the model, and how to load it."""

from typing import TYPE_CHECKING

from spot import report
from spot.hashes import hash_model
from spot.placement.priors import resolve_prior

if TYPE_CHECKING:
    from spot.models.spot_vit import SpotViT

PAPER = "https://openreview.net/forum?id=XrBzSmzAVo"


def card(model: "SpotViT", name: str = "", licence: str = "") -> str:
    """A card in Markdown, with the hub's YAML header.

    Args:
        name: the name to pass to spot.load, by default the model's own.
        licence: of the weights; by default timm's entry, or unknown if there is none.
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
        "## Licence",
        "",
    ]
    lines += [f"Weights: {licence or 'as their base model, which does not say here'}. Code: Apache-2.0."]
    lines += ["", f"Weights {hash_model(model)}, spot-vit {report.versions()['spot-vit']}."]
    return "\n".join(lines) + "\n"
