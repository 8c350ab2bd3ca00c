"""Token Merging (ToMe; Bolya et al., 2023): similar tokens become one, a few in every block.

Between a block's attention and its MLP the tokens are dealt alternately into two halves. Every
token of the first half finds the most similar one of the second, by the cosine of their keys
averaged over heads; the r most similar pairs become one token each, the mean of all input tokens
they stand for. A token of size s then counts s times as a key: log s is added to its attention
logits (proportional attention). Class, register and other prefix tokens are never merged.

How much is merged is given by one of `r` (per block: a number, or one for each block), `tokens`
(left after the last block) or `speedup` (in multiply-adds of the blocks); the latter two are spread
evenly. No block merges more than half its tokens: there a constant r becomes that half, as in the
paper, where r = 16 merges 10 of the last 20 tokens.

With rotary positions a merged token stands at the mean position of the input tokens it stands
for. With averaging or attention pooling it also weighs as many times in the pool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, AttentionPoolLatent, AttentionRope
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ResPostBlock
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.tokens.position_embedding import rotary_embedding


@dataclass
class Merged:
    """Tokens after merging N into M. P prefix tokens lead the features and are counted nowhere else."""

    features: Tensor  # (B, P + M, D), after the ViT's last norm
    sizes: Tensor  # (B, M), how many of the N input tokens each token stands for
    sources: Tensor  # (B, N), for every input token the index, below M, of the token it is part of
    positions: Tensor  # (B, M, 2), the mean position (y, x) of a token's sources, fraction of H and W

    def spread(self, values: Tensor) -> Tensor:
        """Values of merged tokens (B, M, …) given back to the N input tokens they stand for (B, N, …)."""
        return values[torch.arange(len(values), device=values.device)[:, None], self.sources]


class ToMe(nn.Module):
    """A SpotViT that merges tokens on the way, on the ViT's grid or after its own placement.

    Args:
        model: as made by spot.adapt; its parameters are shared, not copied.
        r, tokens, speedup: exactly one of them, as the module's docstring says.
        own_placement: begin with the model's own prior and budget instead of the ViT's grid.
    """

    def __init__(
        self,
        model: SpotViT,
        *,
        r: int | Sequence[int] | None = None,
        tokens: int | None = None,
        speedup: float | None = None,
        own_placement: bool = False,
    ) -> None:
        super().__init__()
        if sum(goal is not None for goal in (r, tokens, speedup)) != 1:
            raise InputError("ToMe needs exactly one of r, tokens and speedup")
        check_mergeable(model)
        self.model = model
        self.own_placement = own_placement
        self._goal: tuple[str, Any] = ("r", r) if r is not None else ("speedup", speedup)
        if tokens is not None:
            self._goal = ("tokens", tokens)
        self._schedules: dict[int, list[int]] = {}  # by the number of tokens that enter the first block
        self.schedule()  # refuse now what cannot be done

    @classmethod
    def matching(cls, model: SpotViT, tokens: int) -> "ToMe":
        """The ToMe whose blocks need no more multiply-adds than `tokens` tokens throughout, if it can.

        Merging begins with the whole grid, so the cost of very few tokens is out of reach; then every
        block merges half of what it gets, and `macs` tells what that costs.
        """
        check_mergeable(model)
        blocks, prefix, cells = _blocks(model), model.num_prefix_tokens, len(model.grid())
        none = [0] * len(blocks)
        dense = sum(merging_macs(blocks, cells, prefix, none))
        wanted = dense / sum(merging_macs(blocks, tokens, prefix, none))
        halving = evenly(len(blocks) * cells, cells, len(blocks))
        most = dense / sum(merging_macs(blocks, cells, prefix, halving))
        return cls(model, speedup=max(1.0, min(wanted, most)))

    @property
    def starting_tokens(self) -> int:
        """How many tokens enter the first block, without prefix tokens."""
        return self.model.tokens if self.own_placement else len(self.model.grid())

    @property
    def tokens(self) -> int:
        """How many tokens leave the last block, without prefix tokens. Setting it sets the goal."""
        return self.starting_tokens - sum(self.schedule())

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        to_reach(tokens, self.starting_tokens, len(_blocks(self.model)))  # refuses before anything changes
        self._goal = ("tokens", tokens)
        self._schedules = {}

    def schedule(self, starting_tokens: int | None = None) -> list[int]:
        """How many tokens each block merges away."""
        start = self.starting_tokens if starting_tokens is None else starting_tokens
        if start not in self._schedules:
            (goal, value), blocks = self._goal, _blocks(self.model)
            if goal == "tokens":
                self._schedules[start] = to_reach(value, start, len(blocks))
            elif goal == "speedup":
                self._schedules[start] = to_speed_up(value, start, blocks, self.model.num_prefix_tokens)
            else:
                self._schedules[start] = as_given(value, start, len(blocks))
        return self._schedules[start]

    def macs(self, starting_tokens: int | None = None) -> list[int]:
        """Multiply-adds of each block for one image."""
        start = self.starting_tokens if starting_tokens is None else starting_tokens
        prefix = self.model.num_prefix_tokens
        return merging_macs(_blocks(self.model), start, prefix, self.schedule(start))

    def place(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        """Where tokens begin: the ViT's grid, or the model's own placement (B, N, 2)."""
        if self.own_placement:
            return self.model.place(images, generator)
        return self.model.grid(images).expand(len(images), -1, -1)

    def merge(self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None) -> Merged:
        """Features with what became of every token."""
        vit: Any = self.model.vit
        if positions is None and not self.own_placement and tuple(images.shape[-2:]) == self.model.img_size:
            positions = self.place(images)
            x, rope = _embed_patches(vit, images)
        else:
            positions = self.place(images, generator) if positions is None else positions
            positions = self.model._placed(images, positions, generator)  # refuses what is no placement
            x, rope = self.model.embed(images, positions)
        start, prefix = positions.shape[1], self.model.num_prefix_tokens
        sources = torch.arange(start, device=x.device).expand(len(x), -1)
        sizes = torch.ones(len(x), start, device=x.device)
        given: dict[str, Tensor] = {}  # what blocks take beside the tokens
        for depth, (block, r) in enumerate(zip(vit.blocks, self.schedule(start), strict=True)):
            if rope is not None:
                given["rope"] = rope[depth] if vit.rope_mixed else rope
            if r == 0:
                x = block(x, **given)
                continue
            x, keys = _attention_half(block, x, given)
            index = match(keys[:, prefix:], r)
            merged = sizes.new_zeros(len(x), sizes.shape[1] - r).scatter_add(1, index, sizes)
            share = sizes / merged.gather(1, index)
            x = torch.cat([x[:, :prefix], combine(x[:, prefix:], share, index, r)], 1)
            x = _mlp_half(block, x)
            positions = combine(positions, share, index, r)
            sources = index.gather(1, sources)
            sizes = merged
            given["attn_mask"] = F.pad(sizes.log(), (prefix, 0))[:, None, None].to(x.dtype)
            if rope is not None:
                cells = [length / self.model.patch_size for length in images.shape[-2:]]
                rope = rotary_embedding(vit.rope, positions, cells)
        return Merged(vit.norm(x), sizes, sources, positions)

    def forward_features(
        self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Features (B, P + M, D); `merge` also tells their sizes and sources."""
        return self.merge(images, positions, generator).features

    def forward_head(self, features: Tensor, pre_logits: bool = False, sizes: Tensor | None = None) -> Tensor:
        """Logits; sizes (B, M), from `merge`, let a pooled token weigh as many as it stands for."""
        vit: Any = self.model.vit
        if sizes is None or vit.global_pool not in ("avg", "map"):
            return self.model.forward_head(features, pre_logits)
        prefix = self.model.num_prefix_tokens
        included = vit.attn_pool is not None if not hasattr(vit, "pool_include_prefix") else vit.pool_include_prefix
        weights = F.pad(sizes, (prefix, 0), value=1.0) if included else sizes
        if vit.attn_pool is None:
            # timm takes the plain mean, so a token is first scaled by its share times the number of tokens.
            share = weights * weights.shape[1] / weights.sum(1, keepdim=True)
            share = share if included else F.pad(share, (prefix, 0), value=1.0)
            return self.model.forward_head(features * share[..., None].to(features.dtype), pre_logits)
        pooled = features if included else features[:, prefix:]
        pooled = vit.attn_pool(pooled, attn_mask=weights.log()[:, None, None].to(pooled.dtype))
        pooled = vit.head_drop(vit.fc_norm(pooled))
        return pooled if pre_logits else vit.head(pooled)

    def forward(self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None) -> Tensor:
        merged = self.merge(images, positions, generator)
        return self.forward_head(merged.features, sizes=merged.sizes)


# ----------------------------------------------------------------------------- matching


@torch.no_grad()
def match(keys: Tensor, r: int) -> Tensor:
    """Merge r of N tokens by their keys (B, N, d) → the index, below N − r, that each one gets (B, N).

    Tokens 0, 2, 4, … may go into tokens 1, 3, 5, …; first come those of the former that stay, in
    their order, then all of the latter.
    """
    keys = F.normalize(keys.float(), dim=-1)
    first, second = keys[:, ::2], keys[:, 1::2]
    stay = first.shape[1] - r
    similarity, partner = (first @ second.transpose(1, 2)).max(-1)
    order = similarity.argsort(dim=-1, descending=True, stable=True)
    staying = order[:, r:].sort(dim=-1).values
    places = torch.arange(stay, device=keys.device).expand(len(keys), -1)
    index = torch.empty(keys.shape[:2], dtype=torch.long, device=keys.device)
    index[:, ::2] = (partner + stay).scatter(1, staying, places)
    index[:, 1::2] = torch.arange(second.shape[1], device=keys.device) + stay
    return index


def combine(values: Tensor, share: Tensor, index: Tensor, r: int) -> Tensor:
    """Sum values (B, N, D), each times its share (B, N) of the token it goes into, by index → (B, N − r, D)."""
    weighted = values * share[..., None]
    wide = index[..., None].expand(-1, -1, values.shape[-1])
    summed = weighted.new_zeros(len(values), values.shape[1] - r, values.shape[-1]).scatter_add(1, wide, weighted)
    return summed.to(values.dtype)


# ----------------------------------------------------------------------------- timm's blocks in two halves


def _embed_patches(vit: Any, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """What timm's own patch grid gives the first block, and rotary angles where used: cheaper than windows."""
    x = vit._pos_embed(vit.patch_embed(images))
    x, rope = x if isinstance(x, tuple) else (x, None)
    return vit.norm_pre(x), rope


class _Recording:
    """A timm attention module that writes down the keys it computes; all else is the module's own."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.keys: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention, name)

    def k_norm(self, keys: Tensor) -> Tensor:
        self.keys = self.attention.k_norm(keys)  # (B, heads, P + N, head_dim), before any rotation
        return self.keys


def _attention_half(block: Any, x: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """x plus the block's attention, and the keys (B, P + N, head_dim) averaged over heads."""
    recording = _Recording(block.attn)
    attention = type(block.attn).forward
    if isinstance(block, (ResPostBlock, EvaBlockPostNorm)):
        y = block.norm1(attention(recording, x, **given))
    else:
        y = _layer_scale(block, 1, attention(recording, block.norm1(x), **given))
    assert recording.keys is not None
    return x + block.drop_path1(y), recording.keys.mean(1)


def _mlp_half(block: Any, x: Tensor) -> Tensor:
    """x plus the block's MLP."""
    if isinstance(block, (ResPostBlock, EvaBlockPostNorm)):
        return x + block.drop_path2(block.norm2(block.mlp(x)))
    return x + block.drop_path2(_layer_scale(block, 2, block.mlp(block.norm2(x))))


def _layer_scale(block: Any, half: int, y: Tensor) -> Tensor:
    if isinstance(block, EvaBlock):
        gamma = block.gamma_1 if half == 1 else block.gamma_2
        return y if gamma is None else gamma * y
    return block.ls1(y) if half == 1 else block.ls2(y)


def _blocks(model: SpotViT) -> Sequence[Any]:
    vit: Any = model.vit
    return vit.blocks


def check_mergeable(model: SpotViT) -> None:
    """Refuse backbones whose blocks have no place between attention and MLP, or whose pool cannot weigh."""
    vit: Any = model.vit
    for block in vit.blocks:
        if type(block) not in (Block, ResPostBlock, EvaBlock, EvaBlockPostNorm):
            raise InputError(f"ToMe merges between attention and MLP, and {type(block).__name__} has no such place")
        if type(block.attn) not in (Attention, AttentionRope, EvaAttention):
            raise InputError(f"ToMe does not know the keys of {type(block.attn).__name__}")
    if vit.global_pool not in ("", "token", "max", "avg", "map"):
        raise InputError(f"ToMe cannot weigh merged tokens in the pool {vit.global_pool!r}; use token or avg")
    pool = getattr(vit, "attn_pool", None)
    if pool is not None and (type(pool) is not AttentionPoolLatent or pool.pos_embed is not None):
        raise InputError(f"ToMe cannot weigh merged tokens in {type(pool).__name__}")


# ----------------------------------------------------------------------------- schedules


def as_given(r: int | Sequence[int], tokens: int, depth: int) -> list[int]:
    """The schedule of a constant r, at most half of what a block gets, or exactly of one r for each block."""
    given = [r] * depth if isinstance(r, int) else list(r) if isinstance(r, Sequence) else []
    if len(given) != depth or not all(isinstance(each, int) and each >= 0 for each in given):
        raise InputError(f"r must be a whole number of at least 0, or {depth} of them, got {r!r}")
    schedule, left = [], tokens
    for number, each in enumerate(given):
        most = left // 2
        if each > most and (number == 0 or not isinstance(r, int)):
            raise InputError(f"r = {each} is too large for block {number}: of its {left} tokens it can merge {most}")
        schedule.append(min(each, most))
        left -= schedule[-1]
    return schedule


def decreasing(r: int, depth: int) -> list[int]:
    """As many merges as a constant r, falling linearly from 2r to 0: most is merged early."""
    span = max(1, depth - 1)
    early = [(4 * r * (span - i) + span) // (2 * span) for i in range(depth // 2)]  # 2r · (1 − i / span), rounded
    return [*early, *[r] * (depth % 2), *(2 * r - mirrored for mirrored in reversed(early))]


def evenly(amount: int, tokens: int, depth: int) -> list[int]:
    """amount merges in equal shares, what is left over going to the first blocks, at most half each."""
    schedule = []
    for number in range(depth):
        share = amount // depth + (number < amount % depth)
        schedule.append(min(share, tokens // 2))
        tokens -= schedule[-1]
    return schedule


def to_reach(target: int, tokens: int, depth: int) -> list[int]:
    """The even schedule that leaves exactly `target` of `tokens`."""
    if not isinstance(target, int) or target < 1 or target > tokens:
        raise InputError(f"ToMe can leave 1 to {tokens} of {tokens} tokens, got {target!r}")
    for amount in range(tokens - target, depth * tokens):
        schedule = evenly(amount, tokens, depth)
        surplus = target - (tokens - sum(schedule))
        if surplus < 0:
            continue
        for number in reversed(range(depth)):  # halves overshoot: the last blocks give back
            back = min(surplus, schedule[number])
            schedule[number] -= back
            surplus -= back
        return schedule
    least = tokens - sum(evenly(depth * tokens, tokens, depth))
    raise InputError(f"{depth} blocks that merge at most half leave {least} of {tokens} tokens, got {target}")


def to_speed_up(speedup: float, tokens: int, blocks: Sequence[Any], prefix: int) -> list[int]:
    """The lightest even schedule with at least `speedup` times fewer multiply-adds in the blocks."""
    if not speedup >= 1:
        raise InputError(f"speedup must be at least 1, got {speedup}")
    depth, costs = len(blocks), [block_macs(block) for block in blocks]
    dense = sum(along(costs, tokens, prefix, [0] * depth))
    best = 1.0
    for amount in range(depth * (tokens // 2) + 1):
        schedule = evenly(amount, tokens, depth)
        best = dense / sum(along(costs, tokens, prefix, schedule))
        if best >= speedup:
            return schedule
    raise InputError(f"merging half the tokens in every block is {best:.2f} times faster, not {speedup}")


# ----------------------------------------------------------------------------- cost

Macs = Callable[[int, int, int], int]


def block_macs(block: Any) -> Macs:
    """A function (tokens, prefix tokens, r) → the block's multiply-adds for one image."""
    attention, mlp = _weights(block.attn), _weights(block.mlp)
    head, width = block.attn.head_dim, block.attn.head_dim * block.attn.num_heads

    def macs(tokens: int, prefix: int, r: int) -> int:
        count = tokens + prefix
        matching = (tokens + 1) // 2 * (tokens // 2) * head if r else 0
        return count * attention + 2 * count**2 * width + matching + (count - r) * mlp

    return macs


def merging_macs(blocks: Sequence[Any], tokens: int, prefix: int, schedule: Sequence[int]) -> list[int]:
    """Multiply-adds of each block for one image of `tokens` tokens and `prefix` prefix tokens."""
    return along([block_macs(block) for block in blocks], tokens, prefix, schedule)


def along(costs: Sequence[Macs], tokens: int, prefix: int, schedule: Sequence[int]) -> list[int]:
    """What each block costs when every one merges its share of what the last has left."""
    macs = []
    for cost, r in zip(costs, schedule, strict=True):
        macs.append(cost(tokens, prefix, r))
        tokens -= r
    return macs


def _weights(module: nn.Module) -> int:
    """Entries of all weight matrices: the multiply-adds of one token."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
