"""The timm ViT itself, behind the call that the other models answer."""

from typing import Any

from torch import Generator, Tensor, nn

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.tokens.tokenizer import Tokenizer


class PlainViT(nn.Module):
    """A SpotViT's timm model on its own grid, through timm's own forward. Parameters are shared, not copied."""

    def __init__(self, model: SpotViT) -> None:
        super().__init__()
        if type(model.tokenizer) is not Tokenizer:
            raise InputError("this model's tokens are not a timm ViT's patches, so it has no plain ViT to compare with")
        self.model = model

    @property
    def vit(self) -> Any:
        return self.model.vit

    @property
    def tokens(self) -> int:
        """As many as the grid has cells."""
        return len(self.model.grid())

    def forward_features(
        self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        if positions is not None:
            raise InputError("a plain ViT reads its own grid; to place its tokens call the SpotViT that holds it")
        return self.vit.forward_features(images)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.vit.forward_head(features, pre_logits=pre_logits)

    def forward(self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None) -> Tensor:
        return self.forward_head(self.forward_features(images, positions, generator))
