"""Schedules of ToMe, the number of tokens merged in each block, and their cost.

A schedule has one number for each block: the number of tokens that it merges away, at most half of them.
An even schedule merges the same number in every block, as in the paper; a late one does so from some block
on; a geometric one keeps the same share in every block, down to a floor. Multiply-adds (MACs) are computed
by a formula that matches torch's flop counter, so that a schedule can be chosen by its cost.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from spot.errors import InputError

FEW = (1 / 4, 1 / 3, 1 / 2, 2 / 3)  # the blocks that merge, as shares of the depth: 3, 4, 6 and 8 of 12


def as_given(r: int | Sequence[int], tokens: int, depth: int) -> list[int]:
    """The schedule of a constant r, limited to half of a block's tokens, or of one exact r for each block."""
    given = [r] * depth if isinstance(r, int) else list(r) if isinstance(r, Sequence) else []
    if len(given) != depth or not all(isinstance(each, int) and each >= 0 for each in given):
        raise InputError(f"r must be a whole number of at least 0, or {depth} of them, got {r!r}")
    schedule, left = at_most_half(given, tokens), tokens
    for number, (each, most) in enumerate(zip(given, schedule, strict=True)):
        if each > most and (number == 0 or not isinstance(r, int)):
            raise InputError(f"r = {each} is too large for block {number}: of its {left} tokens it can merge {most}")
        left -= most
    return schedule


def at_most_half(amounts: Sequence[int], tokens: int) -> list[int]:
    """The number of tokens that each block merges away, given the requested amounts."""
    schedule = []
    for amount in amounts:
        schedule.append(min(amount, tokens // 2))
        tokens -= schedule[-1]
    return schedule


def evenly(amount: int, tokens: int, depth: int) -> list[int]:
    """`amount` merges in equal shares, at most half of each block's tokens; the remainder goes to the first blocks."""
    return at_most_half([amount // depth + (number < amount % depth) for number in range(depth)], tokens)


def late(share: float, begin: float, tokens: int, depth: int) -> list[int]:
    """Merge this share of the tokens, the same number in every block, from this share of the blocks on.

    The first blocks process all tokens, so that pairs are matched by better features. At the same multiply-adds
    a late schedule changes a ViT's predictions less than an even one (docs/results/ablations/merging.md).
    """
    first = round(begin * depth)
    r = int(share * tokens / (depth - first) + 1e-9)
    return at_most_half([0] * first + [r] * (depth - first), tokens)


def in_few_blocks(share: float, tokens: int, depth: int) -> list[int]:
    """Merge this share of the tokens, the same number in each of the FEW blocks.

    Matching takes time even if few tokens are merged: four merges take less than half the time of nine.
    """
    blocks = {round(place * depth) for place in FEW}
    r = int(share * tokens / len(blocks) + 1e-9)
    return at_most_half([r * (block in blocks) for block in range(depth)], tokens)


def to_reach(target: int, tokens: int, depth: int) -> list[int]:
    """The even schedule that leaves exactly `target` of `tokens`."""
    if not isinstance(target, int) or target < 1 or target > tokens:
        raise InputError(f"ToMe can leave 1 to {tokens} of {tokens} tokens, got {target!r}")
    for amount in range(tokens - target, depth * tokens):
        schedule = evenly(amount, tokens, depth)
        surplus = target - (tokens - sum(schedule))
        if surplus < 0:
            continue
        for number in reversed(range(depth)):  # halving overshoots: the last blocks merge less
            back = min(surplus, schedule[number])
            schedule[number] -= back
            surplus -= back
        return schedule
    least = tokens - sum(evenly(depth * tokens, tokens, depth))
    raise InputError(f"{depth} blocks that merge at most half leave {least} of {tokens} tokens, got {target}")


def geometric(kept: float, floor: int, tokens: int, depth: int) -> list[int]:
    """Every block keeps this share of its tokens, at least half, until no more than `floor` are left."""
    schedule = []
    for _ in range(depth):
        schedule.append(min(round((1 - kept) * tokens), tokens // 2, max(0, tokens - floor)))
        tokens -= schedule[-1]
    return schedule


def to_speed_up(
    speedup: float, tokens: int, costs: "Sequence[BlockCost]", prefix: int, floor: int | None = None
) -> list[int]:
    """The schedule with the fewest merges that needs at least `speedup` times fewer multiply-adds in the blocks.

    floor: None gives an even schedule; a number gives a geometric one that leaves at least this many tokens.
    """
    if not speedup >= 1:
        raise InputError(f"speedup must be at least 1, got {speedup}")
    depth, best = len(costs), 1.0
    dense = sum(merging_macs(costs, tokens, prefix, [0] * depth))
    finest = depth * (tokens // 2)
    for amount in range(finest + 1):
        if floor is None:
            schedule = evenly(amount, tokens, depth)
        else:
            schedule = geometric(1 - 0.5 * amount / finest, floor, tokens, depth)
        best = dense / sum(merging_macs(costs, tokens, prefix, schedule))
        if best >= speedup:
            return schedule
    limit = "" if floor is None else f" until {floor} are left"
    raise InputError(f"merging half the tokens in every block{limit} is {best:.2f} times faster, not {speedup}")


def merging_macs(costs: "Sequence[BlockCost]", tokens: int, prefix: int, schedule: Sequence[int]) -> list[int]:
    """Multiply-adds of each block under a schedule."""
    macs = []
    for cost, r in zip(costs, schedule, strict=True):
        macs.append(cost.macs(tokens, prefix, r))
        tokens -= r
    return macs


class BlockCost(NamedTuple):
    """Multiply-adds of a block: per token before and after merging, per pair of tokens, and per match."""

    before: int
    after: int
    pair: int
    match: int

    @classmethod
    def of(cls, block: Any) -> "BlockCost":
        attention = block.attn
        before = _weights(attention)
        width = attention.num_heads * attention.head_dim  # a query times a key, and the value times its weight
        return cls(before, _weights(block) - before, 2 * width, attention.head_dim)

    def macs(self, tokens: int, prefix: int, r: int) -> int:
        """Multiply-adds for one image, with r tokens merged away."""
        count = tokens + prefix
        matching = (tokens + 1) // 2 * (tokens // 2) * self.match if r else 0
        return count * self.before + count**2 * self.pair + matching + (count - r) * self.after


def _weights(module: nn.Module) -> int:
    """Entries of all weight matrices: the multiply-adds of one token."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
