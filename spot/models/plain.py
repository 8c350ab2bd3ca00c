"""The timm ViT itself, behind the call that the other models answer."""

from typing import Any

import torch
from torch import Generator, Tensor

from spot.errors import InputError
from spot.models.protocol import Wrapper
from spot.models.spot_vit import SpotViT
from spot.tokens.tokenizer import Tokenizer


class PlainViT(Wrapper):
    """A SpotViT's timm model on its own grid, through timm's own forward."""

    def __init__(self, model: SpotViT) -> None:
        super().__init__(model, len(model.grid()))
        if type(model.tokenizer) is not Tokenizer:
            raise InputError("this model's tokens are not a timm ViT's patches, so it has no plain ViT to compare with")

    def check_tokens(self, tokens: int, cells: int) -> None:
        if tokens != cells:
            raise InputError(
                f"a plain ViT has all {cells} tokens of its grid, not {tokens}; call its SpotViT for fewer"
            )

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        self.check_tokens(tokens, self.tokens)
        return self.model.grid(images)

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placing: Any) -> Tensor:
        grid = self.place(images, **placing)
        if positions is not None and not torch.equal(positions, grid):
            raise InputError("a plain ViT reads its own grid; to place its tokens call the SpotViT that holds it")
        return self.model.vit.forward_features(images)
