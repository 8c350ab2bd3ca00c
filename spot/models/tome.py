"""Token Merging (ToMe; Bolya et al., 2023): every block merges a few similar tokens.

Between a block's attention and its MLP the tokens are split alternately into two halves. Every
token of the first half is matched to the most similar token of the second half, by the cosine of
their keys averaged over heads. Each of the r most similar pairs becomes one token: the mean of all
input tokens that it represents. A token that represents s input tokens has s times the weight as a
key: log s is added to its attention logits (proportional attention). Prefix tokens are never merged.

One of three arguments sets the amount: `r` (per block: a number, or one for each block), `tokens`
(left after the last block) or `speedup` (in multiply-adds of the blocks). The latter two give an even
schedule or, with a `floor`, a geometric one until that many tokens are left. A block merges at most
half of its tokens, and a larger constant r is reduced to that half. So in the paper r = 16 merges 10
of the last 20 tokens.

With rotary positions a merged token has the mean position of its input tokens. With average or
attention pooling its weight is the number of its input tokens. The blocks must be timm's
standard ones (`Block`, `EvaBlock`); parallel, post-norm and differential blocks are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import AttentionPoolLatent
from torch import Tensor
from torch.nn import functional as F

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.models.tome_schedule import BlockCost, as_given, geometric, merging_macs, to_reach, to_speed_up
from spot.models.wrappers import Wrapper
from spot.tokens.position_embedding import rotary_embedding
from spot.tokens.tokenizer import Tokenizer


@dataclass
class Merged:
    """Tokens after merging N into M. Only `features` includes the P prefix tokens, which come first."""

    features: Tensor  # (B, P + M, D), after the ViT's last norm
    sizes: Tensor  # (B, M), the number of input tokens that each token represents
    sources: Tensor  # (B, N), for every input token the index, below M, of the token it was merged into
    positions: Tensor  # (B, M, 2), the mean position (y, x) of a token's sources, fraction of H and W


class ToMe(Wrapper):
    """A SpotViT that merges tokens between its blocks, on the ViT's grid or after its own placement.

    Args:
        model: as made by spot.adapt; its parameters are shared, not copied.
        r, tokens, speedup: exactly one of them; see the module's docstring.
        floor: with a speedup, the smallest number of tokens left.
        own_placement: start from the model's own prior and budget instead of the ViT's grid.
    """

    def __init__(
        self,
        model: SpotViT,
        *,
        r: int | Sequence[int] | None = None,
        tokens: int | None = None,
        speedup: float | None = None,
        floor: int | None = None,
        own_placement: bool = False,
    ) -> None:
        super().__init__(model)
        goals: dict[str, Any] = {"r": r, "tokens": tokens, "speedup": speedup}
        goals = {name: goal for name, goal in goals.items() if goal is not None}
        if len(goals) != 1:
            raise InputError("ToMe needs exactly one of r, tokens and speedup")
        if floor is not None and (speedup is None or floor < 1):
            raise InputError(f"a floor of at least 1 token goes with a speedup, got floor={floor}")
        self._floor = floor
        check_mergeable(model)
        self.own_placement = own_placement
        self._goal: tuple[str, Any] = goals.popitem()
        self._costs = [BlockCost.of(block) for block in model.vit.blocks]
        self._schedules: dict[int, list[int]] = {}  # by the number of tokens that enter the first block
        self.schedule()  # refuses an impossible schedule now

    @classmethod
    def matching(cls, model: SpotViT, tokens: int, *, floor: float | None = None) -> "ToMe":
        """The ToMe on the grid whose blocks need no more multiply-adds than `tokens` tokens without merging.

        Merging begins with more tokens, so it cannot reach the cost of very few. Then every block
        merges half of its tokens, and `macs` returns the resulting cost.

        floor: of a geometric schedule, as a share of `tokens`, reduced if the cost requires it; None is even.
        """
        none = cls(model, r=0)
        dense, cells = sum(none.macs()), none.starting_tokens
        least = max(sum(none.macs(tokens)), sum(cls(model, r=cells // 2).macs()))
        speedup = max(1.0, dense / least)
        for left in () if floor is None else range(max(1, round(floor * tokens)), 0, -1):
            schedule = geometric(0.5, left, cells, len(none._costs))  # the largest possible merge
            if dense / sum(merging_macs(none._costs, cells, model.num_prefix_tokens, schedule)) >= speedup:
                return cls(model, speedup=speedup, floor=left)
        return cls(model, speedup=speedup)

    @property
    def starting_tokens(self) -> int:
        """The number of tokens that enter the first block, without prefix tokens."""
        return self.model.tokens if self.own_placement else len(self.model.grid())

    @property
    def random(self) -> bool:  # type: ignore[override]
        return self.own_placement and self.model.random

    @property
    def tokens(self) -> int:
        """The number of tokens after the last block, without prefix tokens. Setting it changes the schedule."""
        return self.starting_tokens - sum(self.schedule())

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        to_reach(tokens, self.starting_tokens, len(self._costs))  # refuses an invalid number before anything changes
        self._goal = ("tokens", tokens)
        self._schedules = {}

    def schedule(self, starting_tokens: int | None = None) -> list[int]:
        """The number of tokens that each block merges away."""
        start = starting_tokens or self.starting_tokens
        if start not in self._schedules:
            goal, value = self._goal
            if goal == "speedup":
                self._schedules[start] = to_speed_up(
                    value, start, self._costs, self.model.num_prefix_tokens, self._floor
                )
            else:
                rule = to_reach if goal == "tokens" else as_given
                self._schedules[start] = rule(value, start, len(self._costs))
        return self._schedules[start]

    def macs(self, starting_tokens: int | None = None) -> list[int]:
        """Multiply-adds of each block for one image."""
        start = starting_tokens or self.starting_tokens
        return merging_macs(self._costs, start, self.model.num_prefix_tokens, self.schedule(start))

    def place(self, images: Tensor, *, tokens: int | None = None, **how: Any) -> Tensor:
        """Initial positions (B, N, 2): the ViT's grid, or the model's own placement."""
        if tokens not in (None, self.tokens):
            raise InputError(f"this ToMe leaves {self.tokens} tokens, got {tokens}; set its tokens instead")
        return self.model.place(images, **how) if self.own_placement else super().place(images, **how)

    def merge(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Merged:
        """Features, with the size, sources and position of every merged token."""
        features, sizes, merges, positions = self._encoded(images, positions, **placement)
        sources = torch.arange(positions.shape[1], device=sizes.device).expand(len(sizes), -1)
        for index, share, left in merges:
            sources = index.gather(1, sources)
            positions = combine(positions, share, index, left)
        return Merged(features, sizes, sources, positions)

    def _encoded(
        self, images: Tensor, positions: Tensor | None, **placement: Any
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor, int]], Tensor]:
        """Features, sizes, each merge as index, shares and tokens left, and the initial positions."""
        model, vit = self.model, self.model.vit
        on_grid = positions is None and not self.own_placement
        if positions is None:
            positions = self.place(images, **placement)
        if on_grid and type(model.tokenizer) is Tokenizer and tuple(images.shape[-2:]) == model.img_size:
            x = vit._pos_embed(vit.patch_embed(images))  # timm's own patches are cheaper than windows
            x, rope = x if isinstance(x, tuple) else (x, None)
            x = vit.norm_pre(x)
        else:
            x, rope = model.embed(images, model.positions_for(images, positions))
        start, prefix = positions.shape[1], model.num_prefix_tokens
        sizes = torch.ones(len(x), start, device=x.device)
        merges: list[tuple[Tensor, Tensor, int]] = []
        began = positions
        given: dict[str, Tensor] = {}  # further arguments of the blocks
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
            x = torch.cat([x[:, :prefix], combine(x[:, prefix:], share, index, merged.shape[1])], 1)
            x = _mlp_half(block, x)
            merges.append((index, share, merged.shape[1]))
            sizes = merged
            given["attn_mask"] = F.pad(sizes.log(), (prefix, 0))[:, None, None].to(x.dtype)
            if rope is not None:
                positions = combine(positions, share, index, merged.shape[1])
                cells = [length / model.patch_size for length in images.shape[-2:]]
                rope = rotary_embedding(vit.rope, positions, cells)
        return vit.norm(x), sizes, merges, began

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        """Features (B, P + M, D); `merge` also returns their sizes and sources."""
        return self._encoded(images, positions, **placement)[0]

    def forward_head(self, features: Tensor, pre_logits: bool = False, sizes: Tensor | None = None) -> Tensor:
        """Logits; sizes (B, M) from `merge` weight each token in the pool by the number of its input tokens."""
        vit = self.model.vit
        if sizes is None or vit.global_pool not in ("avg", "map"):
            return self.model.forward_head(features, pre_logits)
        prefix = self.model.num_prefix_tokens
        included = vit.attn_pool is not None if not hasattr(vit, "pool_include_prefix") else vit.pool_include_prefix
        weights = F.pad(sizes, (prefix, 0), value=1.0) if included else sizes
        if vit.attn_pool is None:
            # timm computes an unweighted mean, so each token is first scaled by its share times the number of tokens.
            share = weights * weights.shape[1] / weights.sum(1, keepdim=True)
            share = share if included else F.pad(share, (prefix, 0), value=1.0)
            return self.model.forward_head(features * share[..., None].to(features.dtype), pre_logits)
        pooled = features if included else features[:, prefix:]
        pooled = vit.attn_pool(pooled, attn_mask=weights.log()[:, None, None].to(pooled.dtype))
        pooled = vit.head_drop(vit.fc_norm(pooled))
        return pooled if pre_logits else vit.head(pooled)

    def forward(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        features, sizes, *_ = self._encoded(images, positions, **placement)
        return self.forward_head(features, sizes=sizes)


# ----------------------------------------------------------------------------- matching


@torch.no_grad()
def match(keys: Tensor, r: int) -> Tensor:
    """Merge r of N tokens by their keys (B, N, d) → the new index, below N − r, of each token (B, N).

    Tokens 0, 2, 4, … may be merged into tokens 1, 3, 5, …. The remaining tokens of the first set come
    first, in their order, then all of the second set.
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


def combine(values: Tensor, share: Tensor, index: Tensor, left: int) -> Tensor:
    """Sum values (B, N, D) by index, each weighted with its share (B, N) of the merged token → (B, left, D)."""
    weighted = values * share[..., None]
    wide = index[..., None].expand(-1, -1, values.shape[-1])
    summed = weighted.new_zeros(len(values), left, values.shape[-1]).scatter_add(1, wide, weighted)
    return summed.to(values.dtype)


# ----------------------------------------------------------------------------- timm's blocks in two halves

# By name, because older versions of timm lack some of them.
BLOCKS = ("Block", "EvaBlock")
ATTENTION = ("Attention", "AttentionRope", "EvaAttention")


class _Recording:
    """Wraps a timm module and records the keys it computes; everything else is delegated to the module."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.keys: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def k_norm(self, keys: Tensor) -> Tensor:
        self.keys = self.module.k_norm(keys)  # (B, heads, P + N, head_dim), before any rotation
        return self.keys


def _attention_half(block: Any, x: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """x plus the block's attention, and the keys (B, P + N, head_dim) averaged over heads."""
    recording = _Recording(block.attn)
    y = type(block.attn).forward(recording, block.norm1(x), **given)
    assert recording.keys is not None
    return x + block.drop_path1(_layer_scale(block, 1, y)), recording.keys.mean(1)


def _mlp_half(block: Any, x: Tensor) -> Tensor:
    """x plus the block's MLP."""
    return x + block.drop_path2(_layer_scale(block, 2, block.mlp(block.norm2(x))))


def _layer_scale(block: Any, half: int, y: Tensor) -> Tensor:
    if type(block).__name__ != "EvaBlock":
        return getattr(block, f"ls{half}")(y)
    gamma = getattr(block, f"gamma_{half}")
    return y if gamma is None else gamma * y


def check_mergeable(model: SpotViT) -> None:
    """Refuse blocks other than timm's standard ones, and pools that cannot weight merged tokens."""
    vit = model.vit
    for block in vit.blocks:
        kinds = type(block).__name__, type(getattr(block, "attn", None)).__name__
        if kinds[0] not in BLOCKS or kinds[1] not in ATTENTION:
            raise InputError(f"ToMe merges in timm's standard blocks, not in {kinds[0]} with {kinds[1]}")
    if vit.global_pool not in ("", "token", "max", "avg", "map"):
        raise InputError(f"ToMe cannot weigh merged tokens in the pool {vit.global_pool!r}; use token or avg")
    pool = getattr(vit, "attn_pool", None)
    if pool is not None and (type(pool) is not AttentionPoolLatent or pool.pos_embed is not None):
        raise InputError(f"ToMe cannot weigh merged tokens in {type(pool).__name__}")
