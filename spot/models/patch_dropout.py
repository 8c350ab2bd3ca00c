"""PatchDropout at inference (Liu et al., 2023): the ViT sees a random part of its own patches.

timm and the authors keep a rounded *share* of the patches, so that 25 of 196 may become 24. Here
the budget is exact. Patches on the grid are windows at grid positions, so this is a placement:
N of the grid's cells, drawn for every image without replacement.
"""

import torch
from torch import Generator, Tensor

from spot.models.protocol import Wrapper


class PatchDropout(Wrapper):
    """A SpotViT on `tokens` random patches of the grid."""

    random = True

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        """The centres of the kept patches (B, N, 2), in the grid's order."""
        grid = self.model.grid(images)
        cells = grid.shape[1]
        self.check_tokens(tokens, cells)
        # Drawn on the CPU, so one seed keeps the same patches on every device.
        order = torch.rand(len(images), cells, generator=generator).argsort(1)
        kept = order[:, :tokens].sort(1).values.to(grid.device)
        return grid.gather(1, kept[..., None].expand(-1, -1, grid.shape[-1]))
