"""What one would use instead of placing tokens, by name: the one table that commands and studies read.

    BASELINES["tome"].build(model, 25)     # a model that answers as a SpotViT does, with its weights

To add a baseline, write a Wrapper (spot.models.protocol) and list it here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from spot.errors import InputError
from spot.models.elastic import ElasticViT
from spot.models.patch_dropout import PatchDropout
from spot.models.plain import PlainViT
from spot.models.protocol import TokenModel
from spot.models.resize import Resize
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe


@dataclass(frozen=True)
class Baseline:
    """A model to compare with, made of a SpotViT's weights and a budget."""

    name: str
    make: Callable[[SpotViT, int], TokenModel]
    about: str  # what it does
    budget: str  # what N tokens mean for it
    needs: str = "a timm ViT"
    random: bool = False  # another seed gives another result
    dense: bool = False  # always has all tokens of the grid

    def build(self, model: SpotViT, tokens: int | None = None) -> TokenModel:
        """The model for a budget, by default all of the grid; it refuses a budget that it cannot have."""
        cells = len(model.grid())
        if self.dense and tokens not in (None, cells):
            raise InputError(f"{self.name} has all {cells} tokens of its grid, not {tokens}")
        tokens = cells if tokens is None else tokens
        return self.make(model.suited(tokens), tokens)


# The geometric schedule's floor by the budget: the best of seven shapes on 500 images set aside (tools/choose.py).
TOME_FLOOR = 0.8
KEYS = "a timm ViT whose attention shows its keys"
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
                 "N tokens are left after the last block", needs=KEYS),
        Baseline("tome-cost", ToMe.matching, MERGING,
                 "its blocks cost what N tokens cost throughout, where merging can reach that", needs=KEYS),
        Baseline("tome-floor", lambda model, tokens: ToMe.matching(model, tokens, floor=TOME_FLOOR), MERGING,
                 "the same cost, merged in the first blocks until a little less than N tokens are left", needs=KEYS),
        Baseline("elastic", ElasticViT, "patches shifted, rescaled and dropped at random, on whole pixels",
                 "N patches are kept", random=True),
    )
}  # fmt: skip
