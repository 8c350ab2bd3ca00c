"""ElasticViT-style windows (Pardyl et al., "Beyond Grids", 2025): patches shifted, rescaled and dropped.

Elastic windows begin and end on whole pixels: side and shift are whole numbers of pixels, and the
window is read as K × K samples. This is the discrete counterpart of SPoT's subpixel placement. It works
with any SpotViT and omits ElasticViT's embedding of the window's side. The default ranges are ours,
because the published ones belong to ElasticViT's own training.

During training the random windows act as augmentation; in evaluation they are a placement.
"""

import torch
from torch import Generator, Tensor

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.models.wrappers import Wrapper
from spot.placement.priors import check_tokens


def perturb(
    images: Tensor,
    positions: Tensor,
    generator: Generator | None = None,
    *,
    size: int,
    tokens: int | None = None,
    shift: int = 0,
    scale: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Keep random windows of a placement (B, N, 2), and shift and rescale them at random: (B, tokens, 3).

    The third number of a window is its scale: the distance between its samples in pixels, side / K.

    Args:
        size: K, the side in pixels of a window of scale 1.
        tokens: number of windows to keep in each image, drawn without replacement; all by default.
        shift: the largest shift in each direction, in whole pixels.
        scale: sides are drawn uniformly between these multiples of K, rounded to pixels.

    Windows that extend beyond the image are moved inside if they fit.
    """
    batch, count = positions.shape[:2]
    tokens = count if tokens is None else tokens
    check_tokens(tokens)
    if tokens > count:
        raise InputError(f"elastic windows are {count} patches with some dropped, got tokens = {tokens}")
    if shift < 0 or not 0 < scale[0] <= scale[1]:
        raise InputError(f"shift must be at least 0 and scale a rising pair above 0, got {shift} and {scale}")
    # Four numbers for every window, drawn on the CPU: an image's windows depend neither on the device
    # nor on the size of the batch.
    keep, side, *moves = torch.rand(batch, count, 4, generator=generator).to(positions.device).unbind(-1)
    kept = keep.argsort(1)[:, :tokens].sort(1).values

    low, high = (max(1, round(size * each)) for each in scale)
    sides = low + (side.gather(1, kept) * (high - low + 1)).floor()
    centres = []
    for axis, (length, move) in enumerate(zip(images.shape[-2:], moves, strict=True)):
        moved = (move.gather(1, kept) * (2 * shift + 1)).floor() - shift
        start = (positions[..., axis].gather(1, kept) * length - sides / 2).round() + moved
        start = torch.minimum(start, length - sides).clamp(min=0)
        centres.append((start + sides / 2) / length)
    return torch.stack([*centres, sides / size], -1)


class ElasticViT(Wrapper):
    """A SpotViT on elastic windows: patches of its grid, shifted, rescaled and dropped.

    Args:
        model: as made by spot.adapt; its parameters are shared, not copied.
        tokens: number of patches to keep, by default all.
        shift: in whole pixels, by default half a patch.
        scale: the smallest and the largest side, as multiples of the patch's side.
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
        super().__init__(model, len(model.grid()) if tokens is None else tokens)
        self.shift = model.patch_size // 2 if shift is None else shift
        self.scale = scale

    def draw(self, images: Tensor, tokens: int, generator: Generator | None) -> Tensor:
        """Random windows (B, N, 3): y, x and scale."""
        options = {"size": self.model.patch_size, "tokens": tokens, "shift": self.shift}
        return perturb(images, self.model.grid(images), generator, **options, scale=self.scale)
