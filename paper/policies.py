"""The gain from learned placement, and its use of the image: `python -m paper.policies MODEL=WEIGHTS DATA [FILE …]`.

    python -m paper.policies vit-ti=vit.safetensors imagenet-train-5k runs/attention.safetensors runs/oracle.safetensors

Measured on the images in tools/set_aside.txt: the model's own policy and those of the files, each with its controls
(its map of another image, the mean of its maps); isotropic placement; the class attention of the dense ViT, which is
an oracle; and the maps of saliency networks (.onnx files). Agreement and KL are with the dense ViT; ± is the standard
error of the KL's difference from isotropic placement. Prints a table.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.errors import InputError
from spot.models.family import Source, at_budget, dense_model
from spot.models.loading import load_policy, load_source
from spot.models.spot_vit import SpotViT
from spot.options import LearnOptions
from spot.placement.policy import Policy
from spot.placement.sizes import resolve_scale, sized
from spot.training.learn import around_the_middle, attention, saliency_target

SET_ASIDE = Path(__file__).parents[1] / "tools" / "set_aside.txt"
TOKENS = 25
HOW = LearnOptions()


def main(source: Source, data: str, files: list[Path], *, set_aside: Path = SET_ASIDE) -> list[dict[str, Any]]:
    """A row for every placement."""
    model, dense = at_budget(source, TOKENS), dense_model(source)
    images: Any = data_for(model, data, split="train")
    names = set(set_aside.read_text().split())
    images.keep([index for index, key in enumerate(images.keys) if key in names])
    batches = list(loader(images, 50))
    pixels, labels = (torch.cat([getattr(batch, part) for batch in batches]) for part in ("images", "labels"))
    full = in_parts(lambda part: dense(part, dense.grid(part)).softmax(1), pixels)
    policies = {"the policy": model.policy} if isinstance(model.policy, Policy) else {}
    policies |= {file.stem: load_policy(file, source) for file in files if file.suffix != ".onnx"}
    rule = next(iter(policies.values()), None) or Policy(model.patch_size)
    placements = {"isotropic": model.place(pixels, tokens=TOKENS, prior="isotropic")}
    for name, policy in policies.items():
        maps = in_parts(policy.maps, pixels)
        for title, each in (
            (name, maps),
            (f"{name}, map of another image", maps.roll(1, 0)),
            (f"{name}, mean of its maps", maps.mean(0, keepdim=True).expand_as(maps)),
        ):
            placements[title] = placed(model, policy, each, pixels)
    known: dict[str, Any] = {"class attention of the dense ViT": attention}
    known |= {file.stem: saliency_target(str(file)) for file in files if file.suffix == ".onnx"}
    for title, target in known.items():
        maps = in_parts(lambda part, target=target: target(model, dense, part), pixels)
        placements[title] = placed(model, rule, around_the_middle(maps, HOW.center, len(maps)), pixels)
    rows, first = [], None
    for title, positions in placements.items():
        logits = torch.cat([model(*part) for part in zip(pixels.split(50), positions.split(50), strict=True)])
        apart = F.kl_div(logits.log_softmax(1), full, reduction="none").sum(1)
        first = apart if first is None else first
        answer = logits.argmax(1)
        row = {"placement": title, "right, %": 100 * (answer == labels).double().mean().item()}
        row |= {"agree, %": 100 * (answer == full.argmax(1)).double().mean().item(), "KL": apart.mean().item()}
        rows.append(row | {"less than isotropic": (first - apart).mean().item(), "±": error(first - apart)})
    return rows


def in_parts(call: Any, images: Tensor) -> Tensor:
    return torch.cat([call(part) for part in images.split(50)])


def placed(model: SpotViT, policy: Policy, maps: Tensor, images: Tensor) -> Tensor:
    """Positions by the policy's rule, at the model's own scale."""
    size = resolve_scale(model.scale, TOKENS, images, model.patch_size)
    return sized(policy.place(maps, images, TOKENS), size)


def error(differences: Tensor) -> float:
    return (differences.std() / len(differences) ** 0.5).item()


if __name__ == "__main__":
    if len(sys.argv) < 3 or "=" not in sys.argv[1]:
        raise SystemExit(__doc__)
    name, weights = sys.argv[1].split("=", 1)
    try:
        with torch.no_grad():
            loaded = load_source(name, weights=weights or None)
            print(report.markdown(main(loaded, sys.argv[2], [Path(file) for file in sys.argv[3:]])))
    except InputError as error_:
        raise SystemExit(f"policies: {error_}") from None
