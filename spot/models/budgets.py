"""Weights that follow the budget: a retrofit's change of the ViT, in proportion to how few tokens there are.

A ViT needs a large change to see an eighth of its tokens, a small one for half of them, and none on its grid. So a
retrofit that knows the ViT it came from (a delta does) takes log(cells / N) / log(cells / fewest) of its change for N
tokens: all of it at `fewest` and below, nothing on the grid, where it is the ViT itself.

    model = spot.load("vit-ti")             # fewest = 16
    logits = model(images, tokens=49)       # with 9/16 of the change
    few = model.suited(49)                  # a model with the weights for 49 tokens and no others: to save or compile
"""

import copy
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from spot.models.spot_vit import SpotViT

STEPS = 16  # a share is rounded to so many steps, so that few sets of weights are kept


def share_of_change(tokens: int, cells: int, fewest: int) -> float:
    """How much of a retrofit's change N tokens take, of an image whose grid has so many cells: from 0 to 1."""
    if tokens >= cells or fewest >= cells:
        return float(tokens < cells)
    share = math.log(cells / tokens) / math.log(cells / fewest)
    return min(1.0, max(1, round(share * STEPS)) / STEPS)


@torch.no_grad()
def blended(model: "SpotViT", base: "SpotViT", share: float) -> "SpotViT":
    """A copy of the model, frozen, whose weights are the base's and a share of the change; it follows no budget."""
    made = copy.copy(model)
    made._modules = dict(model._modules)
    made.vit = copy.deepcopy(model.vit)
    made.base = made.fewest = None
    made._base, made._suited, made._origin = (), {}, (model,)
    for ours, theirs in zip(made.vit.parameters(), base.vit.parameters(), strict=True):
        ours.copy_(torch.lerp(theirs.to(ours), ours, share))
    return made.eval().requires_grad_(False)
