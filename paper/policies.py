"""The gain from learned placement, and its use of the image: `python -m paper.policies MODEL WEIGHTS DATA`.

    python -m paper.policies vit-ti vit.safetensors imagenet-train-5k

Measured on the images in tools/set_aside.txt: isotropic placement; the model's policy; two controls, its map of another
image and the mean of its maps; and the class attention of the dense ViT, which is an oracle. Agreement and KL are with
the dense ViT; ± is the standard error of the KL's difference from isotropic placement. Prints a table.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paper.program import divergence, images_set_aside, program
from spot import report
from spot.data.loader import loader
from spot.errors import InputError
from spot.models.family import Source, at_budget, dense_model
from spot.models.loading import load_source
from spot.options import LearnOptions
from spot.placement.policy import Policy
from spot.placement.sizes import resolve_scale, sized
from spot.training.learn import attention, center_targets

TOKENS = 25


def main(model: str, weights: Path, data: Path) -> None:
    """Print the table of a retrofit, whose timm ViT has these weights."""
    report.say(report.markdown(compared(load_source(model, weights=weights), data)))


@torch.no_grad()
def compared(source: Source, data: Path) -> list[dict[str, Any]]:
    """A row for every placement."""
    model, dense = at_budget(source, TOKENS), dense_model(source)
    policy = model.policy
    if not isinstance(policy, Policy):
        raise InputError(f"{model.name} has no learned policy; train one with spot learn")
    batches = list(loader(images_set_aside(model, data), 50))
    images, labels = torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])

    def in_parts(call: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([call(part) for part in images.split(50)])

    full = in_parts(lambda part: dense(part, dense.grid(part)).log_softmax(1))
    learned, attended = in_parts(policy.maps), in_parts(lambda part: attention(model, dense, part))
    maps = {
        "the policy": learned,
        "the policy, map of another image": learned.roll(1, 0),
        "the policy, mean of its maps": learned.mean(0, keepdim=True).expand_as(learned),
        "class attention of the dense ViT": center_targets(attended, LearnOptions().center, len(attended)),
    }
    scale = resolve_scale(model.scale, TOKENS, images, model.patch_size)
    placements = {"isotropic": model.place(images, tokens=TOKENS, prior="isotropic")}
    placements |= {name: sized(policy.place(each, images, TOKENS), scale) for name, each in maps.items()}
    rows: list[dict[str, Any]] = []
    even = torch.zeros(())
    for name, positions in placements.items():
        parts = zip(images.split(50), positions.split(50), strict=True)
        logits = torch.cat([model(*part) for part in parts]).log_softmax(1)
        apart, answer = divergence(full, logits), logits.argmax(1)
        even = even if rows else apart
        less = even - apart
        right, agreed = ((answer == each).double().mean().item() for each in (labels, full.argmax(1)))
        row = {"placement": name, "right, %": 100 * right, "agree, %": 100 * agreed, "KL": apart.mean().item()}
        error = (less.std() / len(less) ** 0.5).item()
        rows.append({**row, "less than isotropic": less.mean().item(), "±": error})
    return rows


if __name__ == "__main__":
    program("paper.policies", main, __doc__)
