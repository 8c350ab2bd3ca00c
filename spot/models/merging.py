"""More tokens at the same cost: places more windows than the budget, and merges similar ones in later blocks.

    cheap = Merging(spot.Family("vit-ti"), 25)  # places 37 tokens, keeps 13, and costs as much as 25 tokens
    logits = cheap(images)                      # has the methods of a SpotViT: place, merge, forward_features, …

The first quarter of the blocks processes all tokens. Then four blocks merge the same number of tokens each (ToMe), in
total the share MERGED of those placed. A few merges of many tokens are as accurate as many merges of a few, and take
less time. From a family it takes the weights for the number of tokens that it places.
"""

from collections.abc import Sequence

from spot.errors import InputError
from spot.models.family import Source, at_budget, dense_model
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe, check_mergeable
from spot.models.tome_schedule import BlockCost, in_few_blocks, merging_macs
from spot.placement.priors import AnyPrior, check_tokens

MERGED = 0.7  # the share of the tokens that is merged away
STEPS = 20  # smaller shares are tried in this many steps


class Merging(ToMe):
    """A SpotViT that places more tokens than its budget, and merges them at the budget's multiply-adds."""

    def __init__(self, source: Source, tokens: int, prior: AnyPrior | None = None) -> None:
        """
        Args:
            source: a SpotViT, whose parameters are shared, or a family.
            tokens: the budget: windows and blocks cost as much as this many tokens without merging. The cost of a
                prior that depends on the image is not included.
            prior: the placement; by default the model's own.
        """
        check_tokens(tokens)
        model = dense_model(source)  # the cost does not depend on the weights
        check_mergeable(model)
        count, schedule = affordable(model, tokens)
        super().__init__(at_budget(source, count, prior=prior), r=schedule, own_placement=True)
        self._budget = tokens

    @property
    def tokens(self) -> int:
        """The budget: the number of tokens that cost as much without merging. `starting_tokens` are placed."""
        return self._budget

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        raise InputError(f"weights and merging are chosen for {self._budget} tokens; make another for {tokens}")


def affordable(model: SpotViT, tokens: int) -> tuple[int, list[int]]:
    """The largest number of tokens, up to the grid's, that costs no more than `tokens` if merged; and the schedule."""
    depth, cells = len(model.vit.blocks), len(model.grid())
    for count in range(max(tokens, cells), tokens, -1):
        # The whole grid is merged only as much as the cost requires; fewer tokens always by the share MERGED.
        for step in range(STEPS + 1) if count == cells else (STEPS,):
            schedule = in_few_blocks(MERGED * step / STEPS, count, depth)
            if price(model, count, schedule) <= price(model, tokens, [0] * depth):
                return count, schedule
    return tokens, [0] * depth


def price(model: SpotViT, tokens: int, schedule: Sequence[int]) -> int:
    """Multiply-adds of windows and blocks, for one image."""
    costs = [BlockCost.of(block) for block in model.vit.blocks]
    rows, columns = model.grid_size
    window = model.vit.patch_embed.proj.weight.numel()
    window += rows * columns * model.embed_dim + (rows + columns) ** 2  # position embedding from all cells' kernels
    return tokens * window + sum(merging_macs(costs, tokens, model.num_prefix_tokens, schedule))
