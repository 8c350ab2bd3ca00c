"""Token Merging (ToMe; Bolya et al., 2023): every block merges a few similar tokens.

Between a block's attention and its MLP the tokens are split alternately into two halves. Every
token of the first half is matched to the most similar token of the second half, by the cosine of
their keys averaged over heads. Each of the r most similar pairs becomes one token: the mean of all
input tokens that it represents. A token that represents s input tokens has s times the weight as a
key: log s is added to its attention logits (proportional attention). Prefix tokens are never merged.

    ToMe(model, 16)                                 # 16 merges in every block
    ToMe(model, schedule_for_tokens(model, 25))     # one number for each block, see tome_schedule.py
    Merging(spot.Family("vit-ti"), 25)              # places more than 25 tokens, merges them at the cost of 25

The blocks must be timm's `Block` with `Attention`, and the pool the class token or the mean.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import Attention
from torch import Tensor
from torch.nn import functional as F

from spot.errors import InputError
from spot.models.family import Source, at_budget, dense_model
from spot.models.spot_vit import SpotViT
from spot.models.tome_schedule import check_mergeable, resolve_schedule, schedule_for_budget
from spot.models.wrappers import Wrapper, embed_grid
from spot.placement.priors import AnyPrior, check_tokens


class Merged(NamedTuple):
    """Tokens after merging N into M. Only `features` includes the P prefix tokens, which come first."""

    features: Tensor  # (B, P + M, D), after the ViT's last norm
    sizes: Tensor  # (B, M), the number of input tokens that each token represents
    sources: Tensor  # (B, N), for every input token the index, below M, of the token it was merged into
    positions: Tensor  # (B, M, 2), the mean position (y, x) of a token's sources, fraction of H and W


class ToMe(Wrapper):
    """A SpotViT that merges tokens between its blocks, on the ViT's grid or after its own placement.

    Args:
        model: as made by spot.adapt; its parameters are shared, not copied.
        r: merges in every block, where half of the tokens or more are left (so r = 16 merges 10 of the last 20
            tokens, as in the paper); or a schedule, the exact number for each block.
        own_placement: start from the model's own prior and budget instead of the ViT's grid.
    """

    def __init__(self, model: SpotViT, r: int | Sequence[int], *, own_placement: bool = False) -> None:
        super().__init__(model)
        check_mergeable(model)
        self.r, self.own_placement = r, own_placement
        self.schedule()  # refuses an impossible schedule now

    @property
    def starting_tokens(self) -> int:
        """The number of tokens that enter the first block, without prefix tokens."""
        return self.model.tokens if self.own_placement else len(self.model.grid())

    @property
    def random(self) -> bool:  # type: ignore[override]
        return self.own_placement and self.model.random

    @property
    def tokens(self) -> int:
        """The number of tokens after the last block, without prefix tokens."""
        return self.starting_tokens - sum(self.schedule())

    def schedule(self, starting_tokens: int | None = None) -> list[int]:
        """The number of tokens that each block merges away."""
        tokens = self.starting_tokens if starting_tokens is None else starting_tokens
        return resolve_schedule(self.r, tokens, len(self.model.vit.blocks))

    def place(self, images: Tensor, *, tokens: int | None = None, **placement: Any) -> Tensor:
        """Initial positions (B, N, 2): the ViT's grid, or the model's own placement."""
        if tokens not in (None, self.tokens):
            raise InputError(f"this ToMe is for {self.tokens} tokens, got {tokens}; make another for {tokens}")
        return self.model.place(images, **placement) if self.own_placement else super().place(images, **placement)

    def merge(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Merged:
        """Features, with the size, sources and position of every merged token."""
        model, prefix = self.model, self.model.num_prefix_tokens
        on_grid = positions is None and not self.own_placement
        positions = self.place(images, **placement) if positions is None else positions
        if on_grid:
            x, _ = embed_grid(model, images)
        else:
            x, _ = model.embed(images, model.positions_for(images, positions))
        start = positions.shape[1]
        sizes, mask = torch.ones(len(x), start, device=x.device), None
        sources = torch.arange(start, device=x.device).expand(len(x), -1)
        for block, r in zip(model.vit.blocks, self.schedule(start), strict=True):
            if r == 0:
                x = block(x, attn_mask=mask)
                continue
            x, keys = attention_half(block, x, mask)
            index = match(keys[:, prefix:], r)
            count = sizes.shape[1] - r
            merged = sizes.new_zeros(len(x), count).scatter_add(1, index, sizes)
            x = torch.cat([x[:, :prefix], combine(x[:, prefix:], sizes / merged.gather(1, index), index, count)], 1)
            x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
            sizes, sources = merged, index.gather(1, sources)
            mask = F.pad(sizes.log(), (prefix, 0))[:, None, None].to(x.dtype)
        positions = combine(positions, 1 / sizes.gather(1, sources), sources, sizes.shape[1])
        return Merged(model.vit.norm(x), sizes, sources, positions)

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        """Features (B, P + M, D); `merge` also returns their sizes and sources."""
        return self.merge(images, positions, **placement).features

    def forward_head(self, features: Tensor, pre_logits: bool = False, sizes: Tensor | None = None) -> Tensor:
        """Logits; sizes (B, M) from `merge` weight each token in a mean by the number of its input tokens."""
        if sizes is not None and self.model.vit.global_pool == "avg":
            # timm computes an unweighted mean, so each token is first scaled by its share times the number of tokens.
            share = sizes * sizes.shape[1] / sizes.sum(1, keepdim=True)
            share = F.pad(share, (self.model.num_prefix_tokens, 0), value=1.0)
            features = features * share[..., None].to(features.dtype)
        return self.model.forward_head(features, pre_logits)

    def forward(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        merged = self.merge(images, positions, **placement)
        return self.forward_head(merged.features, sizes=merged.sizes)


class Merging(ToMe):
    """A SpotViT that places more tokens than its budget, and merges similar ones at the budget's multiply-adds.

    With 25 tokens ViT-Ti places 37 and keeps 13. The schedule is `schedule_for_budget`'s. From a family it takes the
    weights for the number of tokens that it places.
    """

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


# Matching


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


def combine(values: Tensor, share: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum values (B, N, D) by index, each weighted with its share (B, N) of the merged token → (B, count, D)."""
    weighted = values * share[..., None]
    wide = index[..., None].expand(-1, -1, values.shape[-1])
    summed = weighted.new_zeros(len(values), count, values.shape[-1]).scatter_add(1, wide, weighted)
    return summed.to(values.dtype)


def attention_half(block: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x plus the block's attention, and the keys (B, P + N, head_dim) averaged over heads."""
    recording = _Recording(block.attn)
    y = Attention.forward(recording, block.norm1(x), attn_mask=mask)  # type: ignore[arg-type]
    assert recording.keys is not None
    return x + block.drop_path1(block.ls1(y)), recording.keys.mean(1)


class _Recording:
    """Wraps a timm Attention and records the keys it computes; everything else is delegated to the module."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.keys: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def k_norm(self, keys: Tensor) -> Tensor:
        self.keys = self.module.k_norm(keys)  # (B, heads, P + N, head_dim)
        return self.keys
