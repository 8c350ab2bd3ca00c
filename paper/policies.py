"""The gain from learned placement, and its use of the image: `python -m paper.policies MODEL WEIGHTS DATA`.

    python -m paper.policies vit-ti vit.safetensors imagenet-train-5k --files runs/attention.safetensors u2netp.onnx

Measured on the images in tools/set_aside.txt: the model's own policy and those of the files, each with its controls
(its map of another image, the mean of its maps); isotropic placement; the class attention of the dense ViT, which is
an oracle; and the maps of saliency networks (.onnx files). Agreement and KL are with the dense ViT; ± is the standard
error of the KL's difference from isotropic placement. Prints a table.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spot import report
from spot.data.loader import loader
from spot.models.family import Source, at_budget, dense_model
from spot.models.loading import load_policy, load_source
from spot.models.spot_vit import SpotViT
from spot.options import LearnOptions
from spot.placement.policy import Policy
from spot.placement.sizes import resolve_scale, sized
from spot.training.learn import around_the_middle, attention, saliency_target
from tools.make_retrofits import images_set_aside
from tools.program import program

TOKENS = 25
HOW = LearnOptions()


def main(model: str, weights: Path, data: Path, files: tuple[Path, ...] = ()) -> None:
    """Print the table of a retrofit, whose timm ViT has these weights."""
    report.say(report.markdown(compared(load_source(model, weights=weights), data, files)))


@torch.no_grad()
def compared(source: Source, data: Path, files: Sequence[Path]) -> list[dict[str, Any]]:
    """A row for every placement."""
    model, dense = at_budget(source, TOKENS), dense_model(source)
    batches = list(loader(images_set_aside(model, data), 50))
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
    program("paper.policies", main, __doc__)
