"""Several glimpses of a large picture, classified separately; the most confident one determines the prediction.

    model = spot.load("runs/signs/model")        # spot learn --look glimpses wrote it
    several = Glimpsed(model)                    # 48 tokens: 16 at each of three places
    logits = several(images)                     # images (B, 3, H, W) of any size → (B, classes)

The finder (spot/placement/finder.py) proposes the places. All windows are read at once, and the ViT processes the
glimpses as a batch. Let p be the probabilities of a glimpse. A picture's logit for a class is the maximum of
log p(class) − log p(none) over its glimpses, so `none` is predicted if it is the likeliest class of every glimpse.
Without a class `none` it is the maximum of log p(class).
"""

from typing import Any

import torch
from torch import Tensor

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.models.wrappers import Wrapper
from spot.placement.finder import Finder
from spot.placement.glimpses import glimpse_positions


class Glimpsed(Wrapper):
    """A model that classifies the places of a picture that its finder scores highest; see the module docstring."""

    def __init__(self, model: SpotViT, glimpses: int | None = None, tokens: int | None = None) -> None:
        """
        Args:
            model: as `spot learn --look glimpses` wrote it: its policy is a Finder, which names the class `none`.
            glimpses: number of places; by default the number given to spot learn, or 3.
            tokens: number of tokens per place; by default the model's own.
        """
        super().__init__(model)
        if not isinstance(model.policy, Finder):
            raise InputError(f"{model.name} has no finder; train one with spot learn --look glimpses")
        learned = model.policy.about["made"]
        self.glimpses = learned.get("glimpses", 3) if glimpses is None else glimpses
        if self.glimpses < 1:
            raise InputError(f"glimpses, the number of places, must be at least 1, got {self.glimpses}")
        self.tokens_per_glimpse = model.tokens if tokens is None else tokens
        self._tokens = self.glimpses * self.tokens_per_glimpse
        names = model.class_names or []
        self.none = names.index(learned["none"]) if learned.get("none") in names else None

    @property
    def finder(self) -> Finder:
        assert isinstance(self.model.policy, Finder)
        return self.model.policy

    def place(self, images: Tensor, **_: Any) -> Tensor:
        """Positions (B, G × N, 7) on the places with the highest scores, glimpse after glimpse."""
        return self.positions(images, self.finder.find(images, self.glimpses).glimpses)

    def positions(self, images: Tensor, glimpses: Tensor) -> Tensor:
        """Positions (B, G × N, 7) on glimpses (B, G, 3)."""
        return glimpse_positions(images, glimpses, glimpses.shape[1] * self.tokens_per_glimpse, self.model.patch_size)

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        """Features (B × G, P + N, D): the glimpses of a picture are consecutive."""
        positions = self.place(images) if positions is None else positions
        if positions.shape[1] != self.tokens:
            wanted = f"{self.glimpses} glimpses have {self.tokens_per_glimpse} tokens each"
            raise InputError(f"{wanted}, so {self.tokens} in all, got {positions.shape[1]} positions")
        return self.encode(images, positions)

    def encode(self, images: Tensor, positions: Tensor) -> Tensor:
        """Features (B × G, P + N, D) of positions (B, G × N, 7) with any number of glimpses G."""
        model, count = self.model, positions.shape[1] // self.tokens_per_glimpse
        x, rope = model.embed(images, positions)
        if rope is not None:
            raise InputError("several glimpses need a ViT with a table of positions, not a rotary one")
        prefix = model.num_prefix_tokens
        first = x[:, :prefix].repeat_interleave(count, 0)
        x = torch.cat([first, x[:, prefix:].unflatten(1, (count, self.tokens_per_glimpse)).flatten(0, 1)], 1)
        return model.encode(x)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, classes) of pictures, or with pre_logits the pooled features averaged over glimpses, (B, D)."""
        results = self.model.forward_head(features, pre_logits).unflatten(0, (-1, self.glimpses))
        return results.mean(1) if pre_logits else self.picture_logits(results)

    def glimpse_logits(self, images: Tensor, glimpses: Tensor) -> Tensor:
        """Logits (B, G, classes) of glimpses (B, G, 3)."""
        features = self.encode(images, self.positions(images, glimpses))
        return self.model.forward_head(features).unflatten(0, (len(images), -1))

    def picture_logits(self, logits: Tensor) -> Tensor:
        """Logits (B, G, classes) of glimpses → logits (B, classes) of pictures."""
        scores = logits.log_softmax(-1)
        return (scores if self.none is None else scores - scores[..., self.none, None]).amax(1)
