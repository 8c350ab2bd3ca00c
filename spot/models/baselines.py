"""Baselines, the alternatives to token placement, by name. Commands and studies use this table.

    BASELINES["tome"].build(model, 25)     # has the call of a SpotViT, and its weights

To add a baseline, write a Wrapper (spot.models.wrappers) and list it here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spot.models.elastic import ElasticViT
from spot.models.family import Family, Source, at_budget
from spot.models.merging import Merging
from spot.models.resize import Resize
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.tome_schedule import blocks_macs, schedule_for_macs, schedule_for_tokens
from spot.models.wrappers import PatchDropout, PlainViT, TokenModel
from spot.placement.priors import LEARNED


@dataclass(frozen=True)
class Baseline:
    """A model to compare with, built from a SpotViT's weights and a budget."""

    name: str
    make: Callable[[Any, int], TokenModel]  # from a SpotViT (or a family, with `by_budget`) and a budget
    random: bool = False  # results depend on the seed
    dense: bool = False  # always has all tokens of the grid
    by_budget: bool = False  # selects its weights from a family itself

    def build(self, source: Source, tokens: int | None = None) -> TokenModel:
        """The model for a budget, by default the whole grid; refuses budgets that it does not support."""
        if tokens is None:
            tokens = source.cells if isinstance(source, Family) else len(source.grid())
        weights = source if self.by_budget or isinstance(source, SpotViT) else at_budget(source, tokens)
        return self.make(weights, tokens)


# Chosen from seven schedules for the retrofitted ViT-Ti on 250 images set aside. At the cost of 49
# tokens a geometric schedule with this floor reaches 30.4 %, an even one 9.6. At the cost of 100 the even one is best.
TOME_FLOOR = 0.25  # of the budget, below a third of the grid


def tome_at_cost(model: SpotViT, tokens: int, floor: int | None = None) -> ToMe:
    """ToMe on the grid whose blocks need no more multiply-adds than this many tokens without merging, if possible."""
    return ToMe(model, schedule_for_macs(model, blocks_macs(model, tokens), floor))


def tome_with_floor(model: SpotViT, tokens: int) -> ToMe:
    """ToMe at the cost of this many tokens, with the schedule that was most accurate at that cost."""
    few = 3 * tokens < len(model.grid())
    return tome_at_cost(model, tokens, max(1, round(TOME_FLOOR * tokens)) if few else None)


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline("plain", PlainViT, dense=True),
        Baseline("resize", Resize),  # the whole image, made smaller, so that its grid has N patches
        Baseline("patch-dropout", PatchDropout, random=True),
        Baseline("tome", lambda model, tokens: ToMe(model, schedule_for_tokens(model, tokens))),  # N tokens are left
        Baseline("tome-cost", tome_at_cost),
        Baseline("tome-floor", tome_with_floor),
        Baseline("merged", Merging, by_budget=True),  # more windows, merged at the cost of N tokens
        Baseline("merged-learned", lambda model, tokens: Merging(model, tokens, LEARNED), by_budget=True),
        Baseline("elastic", ElasticViT, random=True),
    )
}
