"""Models that wrap a SpotViT and have the same call: `model(images, positions=None)` returns logits.

A `Wrapper` shares the parameters of its SpotViT and replaces its placement. All baselines are wrappers, also the
timm ViT itself, `PlainViT`. A `TokenModel` is a SpotViT or a wrapper.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.placement.priors import AnyPrior, check_tokens, draw_rows
from spot.tokens.tokenizer import Tokenizer


class Wrapper(nn.Module):
    """Base class of models that wrap a SpotViT. Parameters are shared, not copied."""

    random = False

    def __init__(self, model: SpotViT, tokens: int | None = None) -> None:
        super().__init__()
        self.model = model
        cells = len(model.grid())
        self._tokens = cells if tokens is None else tokens
        self.check_tokens(self._tokens, cells)

    @property
    def spot_vit(self) -> SpotViT:
        return self.model

    @property
    def tokens(self) -> int:
        """The number of patches kept, without class and register tokens."""
        return self._tokens

    def check_tokens(self, tokens: int, cells: int) -> None:
        """Refuse budgets that a grid with this many cells does not support."""
        check_tokens(tokens)
        if tokens > cells:
            raise InputError(f"{type(self).__name__} keeps at most the {cells} patches of the grid, got {tokens}")

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        """Positions of this many tokens; in the base class the grid."""
        return self.model.grid(images)

    def place(
        self,
        images: Tensor,
        *,
        tokens: int | None = None,
        prior: AnyPrior | None = None,
        generator: Generator | None = None,
        keys: Sequence[str] | None = None,
        seed: int = 0,
        maps: Tensor | None = None,
    ) -> Tensor:
        """Positions (B, N, 2), drawn from the generator or, with keys, per image from (seed, key); without maps."""
        if prior is not None:
            raise InputError(f"{type(self).__name__} places tokens in its own way; a prior goes with its SpotViT")
        count = self.tokens if tokens is None else tokens

        def draw(rows: slice, generator: Generator | None) -> Tensor:
            return self.draw(images[rows], count, generator)

        return draw_rows(draw, len(images), generator, keys if self.random else None, seed)

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        """Features (B, P + N, D) at the given positions, by default those of `place`."""
        positions = self.place(images, **placement) if positions is None else positions
        return self.model.forward_features(images, positions)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(features, pre_logits)

    def forward(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        """Logits (B, classes). placement: keyword arguments of `place`, such as tokens and generator."""
        return self.forward_head(self.forward_features(images, positions, **placement))


TokenModel = SpotViT | Wrapper  # called (images, positions=None, **placement) → logits (B, classes)


def embed_grid(model: SpotViT, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """The first block's input for the whole grid, and rotary angles, as from `model.embed`.

    timm's own patch embedding is cheaper than windows. It is used if it fits the images.
    """
    if type(model.tokenizer) is not Tokenizer or tuple(images.shape[-2:]) != model.img_size:
        return model.embed(images, model.grid(images))
    x = model.vit._pos_embed(model.vit.patch_embed(images))
    x, rope = x if isinstance(x, tuple) else (x, None)
    return model.vit.norm_pre(x), rope


class PlainViT(Wrapper):
    """A SpotViT's timm model on its own grid, with timm's patches."""

    def __init__(self, model: SpotViT, tokens: int | None = None) -> None:
        super().__init__(model, tokens)
        if type(model.tokenizer) is not Tokenizer:
            raise InputError("this model's tokens are not a timm ViT's patches, so it has no plain ViT")

    def check_tokens(self, tokens: int, cells: int) -> None:
        if tokens != cells:
            raise InputError(f"a plain ViT has all {cells} tokens of its grid, not {tokens}; use its SpotViT for fewer")

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        self.check_tokens(tokens, self.tokens)
        return self.model.grid(images)

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        grid = self.place(images, **placement)
        if positions is not None and not torch.equal(positions, grid):
            raise InputError("a plain ViT reads its own grid; to place its tokens call the SpotViT that holds it")
        return self.model.encode(*embed_grid(self.model, images))
