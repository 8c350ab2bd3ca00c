"""More tokens at the same cost: places more windows than the budget, and merges similar ones in later blocks.

    cheap = Merging(spot.Family("vit-ti"), 25)  # places 37 tokens, keeps 13, and costs as much as 25 tokens
    logits = cheap(images)                      # has the methods of a SpotViT: place, merge, forward_features, …

The first quarter of the blocks processes all tokens. Then four blocks merge the same number of tokens each (ToMe), in
total the share MERGED of those placed. A few merges of many tokens are as accurate as many merges of a few, and take
less time. From a family it takes the weights for the number of tokens that it places.
"""

from collections.abc import Sequence

from spot.models.family import Source, at_budget, dense_model
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.tome_schedule import blocks_macs, four_blocks, merge_share
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
        count, schedule = schedule_for_budget(dense_model(source), tokens)  # does not depend on the weights
        super().__init__(at_budget(source, count, prior=prior), schedule, own_placement=True)
        self._tokens = tokens

    @property
    def tokens(self) -> int:
        """The budget: the number of tokens that cost as much without merging. `starting_tokens` are placed."""
        return self._tokens


def schedule_for_budget(model: SpotViT, tokens: int) -> tuple[int, list[int]]:
    """The largest number of tokens, up to the grid's, that costs no more than `tokens` if merged; and the schedule."""
    depth, cells = len(model.vit.blocks), len(model.grid())
    budget = windows_and_blocks_macs(model, tokens)
    for count in range(max(tokens, cells), tokens, -1):
        # The whole grid is merged only as much as the cost requires; fewer tokens always by the share MERGED.
        for step in range(STEPS + 1) if count == cells else (STEPS,):
            schedule = merge_share(MERGED * step / STEPS, four_blocks(depth), count, depth)
            if windows_and_blocks_macs(model, count, schedule) <= budget:
                return count, schedule
    return tokens, [0] * depth


def windows_and_blocks_macs(model: SpotViT, tokens: int, schedule: Sequence[int] | None = None) -> int:
    """Multiply-adds of windows and blocks for one image, by default without merging."""
    rows, columns = model.grid_size
    window = model.vit.patch_embed.proj.weight.numel()
    window += rows * columns * model.embed_dim + (rows + columns) ** 2  # position embedding from all cells' kernels
    return tokens * window + blocks_macs(model, tokens, schedule)
