"""ElasticViT-style windows (Pardyl et al., "Beyond Grids", 2025): patches shifted, rescaled and dropped.

Elastic windows begin and end on whole pixels: side and shift are whole numbers of pixels, and the
window is read as K × K samples. This is the discrete counterpart of SPoT's subpixel placement. It works
with any SpotViT and omits ElasticViT's embedding of the window's side. The default ranges are ours,
because the published ones belong to ElasticViT's own training.
"""

import torch
from torch import Generator, Tensor

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.models.wrappers import Wrapper


class ElasticViT(Wrapper):
    """A SpotViT on elastic windows: random patches of its grid, shifted and rescaled at random.

    Args:
        model: as made by spot.adapt; its parameters are shared, not copied.
        tokens: number of patches to keep, by default all.
        shift: the largest shift in each direction in whole pixels, by default half a patch.
        scale: sides are drawn uniformly between these multiples of the patch's side, rounded to pixels.
    """

    random = True

    def __init__(
        self,
        model: SpotViT,
        tokens: int | None = None,
        *,
        shift: int | None = None,
        scale: tuple[float, float] = (0.5, 2.0),
    ) -> None:
        super().__init__(model, tokens)
        self.shift = model.patch_size // 2 if shift is None else shift
        self.scale = scale
        if self.shift < 0 or not 0 < scale[0] <= scale[1]:
            raise InputError(f"shift must be at least 0 and scale a rising pair above 0, got {shift} and {scale}")

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        """Random windows (B, N, 3): y, x and scale. Windows that extend beyond the image are moved inside if they fit.

        The scale is the distance between a window's samples in pixels, its side / K.
        """
        grid, size = self.model.grid(images), self.model.patch_size
        batch, cells = grid.shape[:2]
        self.check_tokens(tokens, cells)
        # Four numbers for every window, drawn on the CPU: an image's windows depend neither on the device
        # nor on the size of the batch.
        keep, side, *moves = torch.rand(batch, cells, 4, generator=generator).to(grid.device).unbind(-1)
        kept = keep.argsort(1)[:, :tokens].sort(1).values

        low, high = (max(1, round(size * factor)) for factor in self.scale)
        sides = low + (side.gather(1, kept) * (high - low + 1)).floor()
        centres = []
        for axis, (length, move) in enumerate(zip(images.shape[-2:], moves, strict=True)):
            moved = (move.gather(1, kept) * (2 * self.shift + 1)).floor() - self.shift
            start = (grid[..., axis].gather(1, kept) * length - sides / 2).round() + moved
            start = torch.minimum(start, length - sides).clamp(min=0)
            centres.append((start + sides / 2) / length)
        return torch.stack([*centres, sides / size], -1)
