"""PatchDropout at inference (Liu et al., 2023): the ViT sees a random part of its own patches.

timm and the authors keep a rounded *share* of the patches, so that 25 of 196 may become 24. Here
the budget is exact. Patches on the grid are windows at grid positions, so this is a placement:
N of the grid's cells, drawn for every image without replacement.
"""

import torch
from torch import Generator, Tensor, nn

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.placement.priors import check_tokens


class PatchDropout(nn.Module):
    """A SpotViT on `tokens` random patches of the grid. Parameters are shared, not copied."""

    def __init__(self, model: SpotViT, tokens: int) -> None:
        super().__init__()
        self.model = model
        self.tokens = tokens

    @property
    def tokens(self) -> int:
        """How many patches are kept; class and register tokens are kept besides."""
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        self._check(tokens, len(self.model.grid()))
        self._tokens = tokens

    @staticmethod
    def _check(tokens: int, cells: int) -> None:
        check_tokens(tokens)
        if tokens > cells:
            raise InputError(f"PatchDropout keeps at most the {cells} patches of the grid, got tokens = {tokens}")

    def place(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        """The centres of the kept patches (B, N, 2), in the grid's order."""
        grid = self.model.grid(images)
        self._check(self.tokens, len(grid))
        # Drawn on the CPU, so one seed keeps the same patches on every device.
        order = torch.rand(len(images), len(grid), generator=generator).argsort(1)
        kept = order[:, : self.tokens].sort(1).values
        return grid[kept.to(grid.device)]

    def forward_features(
        self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        if positions is None:
            positions = self.place(images, generator)
        return self.model.forward_features(images, positions)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(features, pre_logits)

    def forward(self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None) -> Tensor:
        return self.forward_head(self.forward_features(images, positions, generator))
