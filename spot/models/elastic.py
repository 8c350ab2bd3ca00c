"""ElasticViT-style windows (Pardyl et al., "Beyond Grids", 2025): patches shifted, rescaled and dropped.

Elastic windows begin and end on whole pixels: the side is a whole number of pixels, read as K × K
samples, and so is the shift. This is the discrete counterpart of SPoT's subpixel placement, here
for any SpotViT, without ElasticViT's embedding of a window's side. The ranges are arguments; their
defaults are ours, since published ranges belong to ElasticViT's own training.

While training, calling the model is the perturbation; in evaluation it is a placement.
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
    """Keep some of a placement (B, N, 2), and move and rescale their windows at random: (B, tokens, 3).

    The third number of a window is its scale: how many pixels stand between its samples, side / K.

    Args:
        size: K, the side in pixels of a window of scale 1.
        tokens: how many windows of each image to keep, drawn without replacement; all by default.
        shift: windows move by up to this many whole pixels in each direction.
        scale: sides are drawn evenly between these multiples of K, rounded to pixels.

    Windows are pushed back inside the image where they fit into it.
    """
    batch, count = positions.shape[:2]
    tokens = count if tokens is None else tokens
    check_tokens(tokens)
    if tokens > count:
        raise InputError(f"elastic windows are {count} patches with some dropped, got tokens = {tokens}")
    if shift < 0 or not 0 < scale[0] <= scale[1]:
        raise InputError(f"shift must be at least 0 and scale a rising pair above 0, got {shift} and {scale}")
    # Four numbers for every window, on the CPU: what an image gets does not depend on the device,
    # nor on how many images come with it.
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
        tokens: how many patches are kept, by default all.
        shift: in whole pixels, by default half a patch.
        scale: the smallest and the largest side as a multiple of the patch's.
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
