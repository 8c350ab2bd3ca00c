"""What one would use instead of placing tokens, by name: the one table that commands and studies read.

    BASELINES["tome"].build(model, 25)     # a model that answers as a SpotViT does, with its weights

To add a baseline, write a Wrapper (spot.models.wrappers) and list it here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spot.errors import InputError
from spot.models.elastic import ElasticViT
from spot.models.family import Family, Source, at_budget
from spot.models.merging import Merging
from spot.models.resize import Resize
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.wrappers import PatchDropout, PlainViT, TokenModel
from spot.placement.priors import LEARNED


@dataclass(frozen=True)
class Baseline:
    """A model to compare with, made of a SpotViT's weights and a budget."""

    name: str
    make: Callable[[Any, int], TokenModel]  # of a SpotViT, or with `by_budget` of a family too, and a budget
    about: str  # what it does
    budget: str  # what N tokens mean for it
    random: bool = False  # another seed gives another result
    dense: bool = False  # always has all tokens of the grid
    by_budget: bool = False  # chooses itself which of a family's weights it takes

    def build(self, source: Source, tokens: int | None = None) -> TokenModel:
        """The model for a budget, by default all of the grid; it refuses a budget that it cannot have."""
        cells = source.cells if isinstance(source, Family) else len(source.grid())
        if self.dense and tokens not in (None, cells):
            raise InputError(f"{self.name} has all {cells} tokens of its grid, not {tokens}")
        tokens = cells if tokens is None else tokens
        weights = source if self.by_budget or isinstance(source, SpotViT) else at_budget(source, tokens)
        return self.make(weights, tokens)


# Chosen among seven shapes with the retrofitted ViT-Ti on 250 images set aside (tools/choose.py): at the cost of 49
# tokens a geometric schedule with this floor has 30.4 % and an even one 9.6; at that of 100 the even one is best.
TOME_FLOOR = 0.25  # of the budget, below a third of the grid


def best_tome(model: SpotViT, tokens: int) -> ToMe:
    """ToMe at the cost of so many tokens, with the schedule that was best there."""
    return ToMe.matching(model, tokens, floor=TOME_FLOOR if 3 * tokens < len(model.grid()) else None)


MERGING = "all patches, similar ones merged in every block"
BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline("plain", lambda model, tokens: PlainViT(model), "the timm ViT itself", "it has all tokens of its grid",
                 dense=True),
        Baseline("resize", Resize, "the whole image, made smaller",
                 "the smaller image has N patches, which must fit its aspect (squares for square images)"),
        Baseline("patch-dropout", PatchDropout, "a random part of the ViT's own patches", "N patches are kept",
                 random=True),
        Baseline("tome", lambda model, tokens: ToMe(model, tokens=tokens), MERGING,
                 "N tokens are left after the last block"),
        Baseline("tome-cost", ToMe.matching, MERGING,
                 "its blocks cost what N tokens cost throughout, where merging can reach that"),
        Baseline("tome-floor", best_tome, MERGING,
                 "the same cost, with the schedule that was best on images set aside"),
        Baseline("merged", Merging, "more windows, placed as the model does, similar ones merged in later blocks",
                 "it costs what N tokens cost throughout", by_budget=True),
        Baseline("merged-learned", lambda model, tokens: Merging(model, tokens, LEARNED),
                 "the same, placed by the model's policy", "the same cost, and the policy's", by_budget=True),
        Baseline("elastic", ElasticViT, "patches shifted, rescaled and dropped at random, on whole pixels",
                 "N patches are kept", random=True),
    )
}  # fmt: skip
