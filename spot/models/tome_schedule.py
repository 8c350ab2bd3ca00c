"""Schedules of ToMe: how many tokens each block merges away, and the multiply-adds (MACs) of the blocks.

A schedule has one number for each block, at most half of the block's tokens. `schedule_for_tokens` and
`schedule_for_macs` find a schedule for a goal, starting from the whole grid. `schedule_for_budget` also chooses the
number of tokens to start from. MACs are computed by a formula that matches torch's counter.
"""

from collections.abc import Collection, Sequence

from timm.models.vision_transformer import Attention, Block
from torch import nn

from spot.errors import InputError
from spot.models.spot_vit import SpotViT

MERGED = 0.7  # the share of its tokens that a Merging merges away
STEPS = 20  # smaller shares are tried in this many steps
FOUR_BLOCKS = (1 / 4, 1 / 3, 1 / 2, 2 / 3)  # shares of the depth: blocks 3, 4, 6 and 8 of 12


def limit_to_half(amounts: Sequence[int], tokens: int) -> list[int]:
    """The requested amounts, reduced to half of each block's tokens."""
    schedule = []
    for amount in amounts:
        schedule.append(min(amount, tokens // 2))
        tokens -= schedule[-1]
    return schedule


def resolve_schedule(r: int | Sequence[int], tokens: int, depth: int) -> list[int]:
    """The schedule of a constant r, limited to half of a block's tokens, or of one exact r for each block."""
    amounts = [r] * depth if isinstance(r, int) else list(r) if isinstance(r, Sequence) else []
    if len(amounts) != depth or not all(isinstance(amount, int) and amount >= 0 for amount in amounts):
        raise InputError(f"r must be a whole number of at least 0, or {depth} of them, got {r!r}")
    schedule = limit_to_half(amounts, tokens)
    exact = amounts[:1] if isinstance(r, int) else amounts
    if schedule[: len(exact)] != exact:
        raise InputError(f"every block merges at most half of its tokens: of {tokens} tokens {schedule}, got {r!r}")
    return schedule


def even(amount: int, tokens: int, depth: int) -> list[int]:
    """`amount` merges in equal shares, at most half of each block's tokens; the remainder goes to the first blocks."""
    return limit_to_half([amount // depth + (number < amount % depth) for number in range(depth)], tokens)


def geometric(kept: float, floor: int, tokens: int, depth: int) -> list[int]:
    """Every block keeps this share of its tokens, at least half, until no more than `floor` are left."""
    schedule = []
    for _ in range(depth):
        schedule.append(min(round((1 - kept) * tokens), tokens // 2, max(0, tokens - floor)))
        tokens -= schedule[-1]
    return schedule


def merge_share(share: float, blocks: Collection[int], tokens: int, depth: int) -> list[int]:
    """Merge this share of the tokens, the same number in each of these blocks.

    If the first blocks merge nothing, pairs are matched by better features. At the same multiply-adds this
    changes a ViT's predictions less than an even schedule (docs/results/ablations/merging.md).
    """
    amount = int(share * tokens / len(blocks) + 1e-9)
    return limit_to_half([amount * (block in blocks) for block in range(depth)], tokens)


def four_blocks(depth: int) -> set[int]:
    """Four blocks for `merge_share`. Matching takes time, so four merges take less than half the time of nine."""
    return {round(place * depth) for place in FOUR_BLOCKS}


def schedule_for_tokens(model: SpotViT, target: int) -> list[int]:
    """The even schedule that leaves exactly `target` tokens of the grid."""
    tokens, depth = len(model.grid()), len(model.vit.blocks)
    if not isinstance(target, int) or target < 1 or target > tokens:
        raise InputError(f"ToMe can leave 1 to {tokens} of {tokens} tokens, got {target!r}")
    least = tokens - sum(even(depth * tokens, tokens, depth))
    if target < least:
        raise InputError(f"{depth} blocks that merge at most half leave {least} of {tokens} tokens, got {target}")
    to_merge = tokens - target
    schedules = (even(amount, tokens, depth) for amount in range(to_merge, depth * tokens))
    schedule = next(schedule for schedule in schedules if sum(schedule) >= to_merge)
    for block, amount in enumerate(schedule):  # halving overshoots: the last blocks merge less
        schedule[block] = min(amount, to_merge)
        to_merge -= schedule[block]
    return schedule


def schedule_for_macs(model: SpotViT, macs: float, floor: int | None = None) -> list[int]:
    """The schedule with the fewest merges of the grid's tokens whose blocks need at most these multiply-adds.

    If no schedule needs so few, every block merges half of its tokens.

    Args:
        floor: None gives an even schedule. A number gives a geometric one that leaves this many tokens, or fewer
            if the multiply-adds require it.
    """
    tokens, depth = len(model.grid()), len(model.vit.blocks)
    steps = depth * (tokens // 2)
    half = even(steps, tokens, depth)
    if floor is None:
        schedules = (even(step, tokens, depth) for step in range(steps + 1))
    else:
        while floor > 1 and blocks_macs(model, tokens, geometric(0.5, floor, tokens, depth)) > macs:
            floor -= 1
        schedules = (geometric(1 - 0.5 * step / steps, floor, tokens, depth) for step in range(steps + 1))
    return next((schedule for schedule in schedules if blocks_macs(model, tokens, schedule) <= macs), half)


def schedule_for_budget(model: SpotViT, tokens: int) -> tuple[int, list[int]]:
    """The largest number of tokens, up to the grid's, that costs no more than `tokens` if merged; and the schedule.

    The first quarter of the blocks processes all tokens. Then four blocks merge the same number of tokens each, in
    total the share MERGED. A few merges of many tokens are as accurate as many merges of a few, and take less time.
    """
    depth, cells = len(model.vit.blocks), len(model.grid())
    budget = windows_and_blocks_macs(model, tokens)
    for count in range(max(tokens, cells), tokens, -1):
        # The whole grid is merged only as much as the cost requires; fewer tokens always by the share MERGED.
        for step in range(STEPS + 1) if count == cells else (STEPS,):
            schedule = merge_share(MERGED * step / STEPS, four_blocks(depth), count, depth)
            if windows_and_blocks_macs(model, count, schedule) <= budget:
                return count, schedule
    return tokens, [0] * depth


def blocks_macs(model: SpotViT, tokens: int, schedule: Sequence[int] | None = None) -> int:
    """Multiply-adds of all blocks for one image of this many tokens, by default without merging."""
    check_mergeable(model)
    block, depth = model.vit.blocks[0], len(model.vit.blocks)  # a ViT's blocks are all alike
    attention, width = count_weights(block.attn), block.attn.num_heads * block.attn.head_dim
    mlp = count_weights(block) - attention
    macs = 0
    for merged in schedule or [0] * depth:
        count = tokens + model.num_prefix_tokens
        macs += count * attention + (count - merged) * mlp
        macs += count**2 * 2 * width  # a query times a key, and the value times its weight
        if merged:
            macs += (tokens + 1) // 2 * (tokens // 2) * block.attn.head_dim  # matching
        tokens -= merged
    return macs


def windows_and_blocks_macs(model: SpotViT, tokens: int, schedule: Sequence[int] | None = None) -> int:
    """Multiply-adds of windows and blocks for one image, by default without merging."""
    rows, columns = model.grid_size
    window = model.vit.patch_embed.proj.weight.numel()
    window += rows * columns * model.embed_dim + (rows + columns) ** 2  # position embedding from all cells' kernels
    return tokens * window + blocks_macs(model, tokens, schedule)


def count_weights(module: nn.Module) -> int:
    """Entries of all weight matrices: the multiply-adds of one token."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def check_mergeable(model: SpotViT) -> None:
    """Refuse blocks other than timm's standard ones, and pools that cannot weight merged tokens."""
    vit = model.vit
    for block in vit.blocks:
        if not is_standard(block):
            kinds = type(block).__name__, type(getattr(block, "attn", None)).__name__
            raise InputError(f"ToMe merges in timm's Block with Attention, not in {kinds[0]} with {kinds[1]}")
    if vit.global_pool not in ("", "token", "avg") or vit.pool_include_prefix:
        raise InputError(f"ToMe needs the class token or the mean of the other tokens, not the pool {vit.global_pool}")


def is_standard(block: nn.Module) -> bool:
    """Whether a block is exactly timm's Block with timm's Attention."""
    attention = getattr(block, "attn", None)
    return type(block) is Block and type(attention) is Attention and getattr(attention, "gate", None) is None
