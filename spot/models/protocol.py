"""What a SpotViT and everything it is compared with have in common: they place tokens and predict from them.

`Wrapper` is a model around a SpotViT whose parameters it shares, which all baselines are; it has the calls
they answer alike. A `TokenModel` is either of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Union, Unpack

from torch import Generator, Tensor, nn

from spot.errors import InputError
from spot.placement.priors import AnyPrior, check_tokens, drawn, resolve_prior
from spot.placement.sizes import Scale

if TYPE_CHECKING:
    from spot.models.spot_vit import SpotViT


class Placing(TypedDict, total=False):
    """What `place` takes beside the images; see SpotViT.place."""

    tokens: int | None
    prior: AnyPrior | None
    generator: Generator | None
    keys: Sequence[str] | None
    seed: int
    maps: Tensor | None


class Wrapper(nn.Module):
    """A model around a SpotViT: parameters are shared, not copied."""

    random = False

    def __init__(self, model: "SpotViT", tokens: int | None = None) -> None:
        super().__init__()
        self.model = model
        if tokens is not None:
            self.tokens = tokens

    @property
    def spot_vit(self) -> "SpotViT":
        return self.model

    @property
    def tokens(self) -> int:
        """How many patches of the grid are kept; class and register tokens are kept besides."""
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        self.check_tokens(tokens, len(self.model.grid()))
        self._tokens = tokens

    def check_tokens(self, tokens: int, cells: int) -> None:
        """Refuse a budget that a grid of so many cells does not have."""
        check_tokens(tokens)
        if tokens > cells:
            raise InputError(f"{type(self).__name__} keeps at most the {cells} patches of the grid, got {tokens}")

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        """Positions of so many tokens; by default the grid."""
        return self.model.grid(images)

    def place(self, images: Tensor, **how: Unpack[Placing]) -> Tensor:
        """Positions (B, N, 2), drawn from the generator or, with keys, each image's from (seed, key) alone."""
        if how.get("prior") is not None:
            raise InputError(f"{type(self).__name__} places tokens in its own way; a prior goes with its SpotViT")
        tokens, keys = how.get("tokens"), how.get("keys") if self.random else None
        count = self.tokens if tokens is None else tokens

        def draw(rows: slice, generator: Generator | None) -> Tensor:
            return self.draw(images[rows], count, generator)

        return drawn(draw, len(images), how.get("generator"), keys, how.get("seed", 0))

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placing: Any) -> Tensor:
        """Features (B, P + N, D) at the positions given, or where the model places them."""
        positions = self.place(images, **placing) if positions is None else positions
        return self.model.forward_features(images, positions)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(features, pre_logits)

    def forward(self, images: Tensor, positions: Tensor | None = None, **placing: Any) -> Tensor:
        """Logits (B, classes). placing: tokens and generator, as `place` takes them."""
        return self.forward_head(self.forward_features(images, positions, **placing))


TokenModel = Union["SpotViT", Wrapper]  # called (images, positions=None, **placing) → logits (B, classes)


class Placed(Wrapper):
    """A SpotViT with another budget, prior or scale than its own, as a model of its own: for timing and counting."""

    def __init__(
        self, model: "SpotViT", tokens: int | None = None, prior: AnyPrior | None = None, scale: Scale | None = None
    ) -> None:
        tokens = model.tokens if tokens is None else tokens
        super().__init__(model.suited(tokens), tokens)
        self.prior, self.scale = model.prior if prior is None else prior, scale

    def check_tokens(self, tokens: int, cells: int) -> None:
        check_tokens(tokens)

    @property
    def random(self) -> bool:  # type: ignore[override]
        return resolve_prior(self.prior).random

    def place(self, images: Tensor, **how: Unpack[Placing]) -> Tensor:
        given: Any = {name: value for name, value in how.items() if value is not None}
        own: Any = {"tokens": self.tokens, "prior": self.prior, "scale": self.scale}
        return self.model.place(images, **{**own, **given})
