"""More tokens for the same cost: windows are placed, and similar ones merged away in later blocks.

    cheap = Merging(spot.Family("vit-ti"), 25)  # places 37 tokens and leaves 13, at the cost of 25 throughout
    logits = cheap(images)                      # called as a SpotViT is: place, merge, forward_features, …

The first quarter of the blocks sees all tokens; then four blocks merge the same number of them (ToMe), in all MERGED of
what was placed. Few merges of many tokens are as accurate as many merges of few, and take less time. The ViT sees more
of the image, and spends on the parts that differ. Of a family it takes the weights for the number of tokens it places.
"""

from collections.abc import Sequence

from spot.errors import InputError
from spot.models.family import Source, at_budget, dense_model
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe, check_mergeable
from spot.models.tome_schedule import BlockCost, in_few_blocks, merging_macs
from spot.placement.priors import AnyPrior, check_tokens

MERGED = 0.7  # the share of the tokens that is merged away
STEPS = 20  # less is merged in so many steps


class Merging(ToMe):
    """A SpotViT that places more tokens than its budget, and merges them at the budget's multiply-adds."""

    def __init__(self, source: Source, tokens: int, prior: AnyPrior | None = None) -> None:
        """
        Args:
            source: a SpotViT, whose parameters are shared, or a family.
            tokens: the budget: windows and blocks cost what so many tokens cost throughout. What a prior that looks
                costs is not in it.
            prior: where tokens go; by default as the model says.
        """
        check_tokens(tokens)
        model = dense_model(source)  # any budget's weights cost the same
        check_mergeable(model)
        count, schedule = affordable(model, tokens)
        super().__init__(at_budget(source, count, prior=prior), r=schedule, own_placement=True)
        self._budget = tokens

    @property
    def tokens(self) -> int:
        """The budget: it costs what so many tokens cost throughout. `starting_tokens` is how many are placed."""
        return self._budget

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        raise InputError(f"weights and merging are chosen for {self._budget} tokens; make another for {tokens}")


def affordable(model: SpotViT, tokens: int) -> tuple[int, list[int]]:
    """The most tokens, at most as many as the grid has, whose merging costs no more than `tokens` do; and how."""
    depth, cells = len(model.vit.blocks), len(model.grid())
    for count in range(max(tokens, cells), tokens, -1):
        # All of the grid is merged no more than it takes; fewer are merged by as much as is good for them.
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
    window += rows * columns * model.embed_dim + (rows + columns) ** 2  # its position, by the kernels of all cells
    return tokens * window + sum(merging_macs(costs, tokens, model.num_prefix_tokens, schedule))
