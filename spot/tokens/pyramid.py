"""Windows of any scale without aliasing: samples from a pyramid of the image.

Level 0 is the image; a pixel of the next level is the mean of 2 × 2 pixels of the one before. A window of
scale s is K × K samples that stand s pixels apart, so its level of detail is log2(s): between two levels
the result is a mix of the bilinear window in both. At s = 1 that is the window of the image itself, at
s = 2 the window of the image shrunk by two, and everything between is continuous and differentiable in
position and scale. Below 1 samples stand closer than pixels: level 0 alone, bilinear.

The share of the coarser level is the square of the level's fraction. Proportional shares blur more: against
an antialiased bicubic resize of photographs from 224 to 144 pixels the error is 0.024 instead of 0.034.

All levels of an image lie one after the other in memory, so that tokens of one batch may be on any level.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spot.errors import InputError


class Pyramid(NamedTuple):
    """An image batch and its shrunk copies. Build it once where the same images are read many times."""

    images: Tensor  # (B, C, H, W), level 0
    pixels: Tensor  # B × C × plane, and a tail: every channel's levels one after the other, row by row
    sizes: tuple[tuple[int, int], ...]  # (height, width) of each level

    @property
    def plane(self) -> int:
        """Pixels of one channel in all levels."""
        return sum(height * width for height, width in self.sizes)

    @property
    def starts(self) -> list[int]:
        """Where each level begins within a channel."""
        counts = [height * width for height, width in self.sizes]
        return [sum(counts[:level]) for level in range(len(counts))]

    def planes(self) -> Tensor:
        """All levels of each channel: (B, C, plane)."""
        batch, channels = self.images.shape[:2]
        return self.pixels[: batch * channels * self.plane].view(batch, channels, self.plane)

    def level(self, number: int) -> Tensor:
        """The images of one level: (B, C, height, width)."""
        if number == 0:
            return self.images
        height, width = self.sizes[number]
        return self.planes()[..., self.starts[number] :][..., : height * width].unflatten(-1, (height, width))

    def part(self, images: slice) -> "Pyramid":
        """The pyramid of some of the images."""
        return Pyramid(self.images[images], self.pixels[images.start * self.images.shape[1] * self.plane :], self.sizes)


def pyramid(images: Tensor, size: int, scale: float | None = None) -> Pyramid:
    """The levels that windows of K = size samples may need, up to the scale at which one covers the image.

    scale: the largest that will be asked for, where it is known; fewer levels are built then.
    """
    largest = largest_scale(images, size) if scale is None else scale
    levels = [images]
    for _ in range(max(0, math.ceil(math.log2(max(largest, 1)) - 1e-6))):
        levels.append(halve(levels[-1]))
    tail = images.new_zeros(2 * size + 2)  # a run of pixels may go on beyond the last one, and is mended then
    pixels = torch.cat([torch.cat([level.flatten(2) for level in levels], 2).flatten(), tail])
    return Pyramid(images, pixels, tuple((level.shape[-2], level.shape[-1]) for level in levels))


def only(images: Tensor) -> Pyramid:
    """Images as a pyramid of one level, without a copy."""
    return Pyramid(images, images.reshape(-1), ((images.shape[-2], images.shape[-1]),))


def largest_scale(images: Tensor, size: int) -> float:
    """The scale at which a window is as long as the image's longer side."""
    return max(1.0, max(images.shape[-2:]) / size)


def halve(images: Tensor) -> Tensor:
    """(B, C, H, W) shrunk by two, means of 2 × 2 pixels; an odd last row or column counts twice."""
    height, width = images.shape[-2:]
    if height % 2 or width % 2:
        images = F.pad(images, (0, width % 2, 0, height % 2), mode="replicate")
    rows = images[..., 0::2, :] + images[..., 1::2, :]
    return (rows[..., 0::2] + rows[..., 1::2]) * 0.25


def check_scale(scale: Tensor, images: Tensor, size: int) -> None:
    """Refuse scales that are no size of a window, where values can be looked at without waiting for a device."""
    if traced() or scale.device.type != "cpu":
        return
    if not scale.numel():
        return
    low, high = (float(each) for each in scale.detach().aminmax())
    if not (low > 0 and math.isfinite(high)):
        bad = high if not math.isfinite(high) else low
        raise InputError(f"scale must be a number above 0, got {bad}; 1 is one sample per pixel")
    largest = largest_scale(images, size)
    if high > largest * (1 + 1e-5):
        raise InputError(
            f"a window of scale {high:g} is {size * high:g} pixels wide, more than the image of "
            f"{images.shape[-2]} × {images.shape[-1]}; use a scale of at most {largest:g}"
        )


def scaled_windows(source: Pyramid, positions: Tensor, scale: Tensor, size: int) -> Tensor:
    """Windows at positions (B, N, 2) and scales (B, N): (B, N, C, K, K), in the positions' dtype."""
    detail = scale.log2().clamp(0, len(source.sizes) - 1)
    below = detail.detach().floor().clamp(max=max(0, len(source.sizes) - 2))
    lower = _level_windows(source, positions, scale, below.long(), size)
    if len(source.sizes) == 1:
        return lower
    upper = _level_windows(source, positions, scale, below.long() + 1, size)
    return torch.lerp(lower, upper, (detail - below).square()[..., None, None, None])


def _level_windows(source: Pyramid, positions: Tensor, scale: Tensor, level: Tensor, size: int) -> Tensor:
    """Bilinear windows, each from one level (B, N) of the pyramid."""
    heights, widths = (torch.tensor(each, device=level.device)[level] for each in zip(*source.sizes, strict=True))
    begin = torch.tensor(source.starts, device=level.device)[level]
    spacing = scale * torch.exp2(-level.to(scale.dtype))
    offsets = torch.arange(size, device=scale.device, dtype=scale.dtype) - (size - 1) / 2
    whole, fractions = [], []
    for axis, (length, kept) in enumerate(zip(source.images.shape[-2:], (heights, widths), strict=True)):
        centre = positions[..., axis] * length * torch.exp2(-level.to(scale.dtype)) - 0.5
        # Far outside every sample is the border pixel: keep numbers small enough to be whole.
        start = (centre[..., None] + offsets * spacing[..., None]).clamp(-2.0 * size - 2, float("inf"))
        start = torch.minimum(start, (kept + 2 * size)[..., None].to(start.dtype))
        whole.append(start.detach().floor())
        fractions.append(start - whole[-1])
    y, x = fractions
    if plain(source.images):
        return _from_runs(source, whole, y, x, (begin, heights, widths))
    rows, columns = (
        torch.cat([each, each + 1], -1).long().clamp(min=0).minimum((length - 1)[..., None])
        for each, length in zip(whole, (heights, widths), strict=True)
    )
    index = begin[..., None, None] + rows[..., :, None] * widths[..., None, None] + columns[..., None, :]
    index = index.flatten(2)[:, :, None].expand(-1, -1, source.images.shape[1], -1)
    corners = source.planes()[:, None].expand(-1, index.shape[1], -1, -1).gather(3, index)
    corners = corners.unflatten(3, (2 * size, 2 * size)).to(scale.dtype)
    left = torch.lerp(corners[..., :size], corners[..., size:], x[..., None, None, :])
    return torch.lerp(left[..., :size, :], left[..., size:, :], y[..., None, :, None])


def plain(images: Tensor) -> bool:
    """Whether these are pixels in CPU memory and nothing else: no gradient, no tracing, no transform."""
    return images.device.type == "cpu" and not images.requires_grad and not traced()


def traced() -> bool:
    """Whether operators are being written down or transformed, so that no value may decide what is run."""
    compiling = torch.compiler.is_compiling() or torch.jit.is_tracing()  # the latter for torch.onnx's old exporter too
    return compiling or torch._C._are_functorch_transforms_active()


def _from_runs(source: Pyramid, whole: list[Tensor], y: Tensor, x: Tensor, place: tuple[Tensor, ...]) -> Tensor:
    """The same samples on a CPU: crops of whole runs of memory, and two small matrix products per channel."""
    top, left = whole[0][..., 0].long(), whole[1][..., 0].long()
    side = 2 + max((int((each[..., -1] - each[..., 0]).max()) if each.numel() else 0) for each in whole)
    crops = crop_runs(source, place, top, left, side).to(y.dtype)
    by_row, by_column = (
        _hats(each - each[..., :1], fraction, side) for each, fraction in zip(whole, (y, x), strict=True)
    )
    return by_row[:, :, None] @ (crops @ by_column.transpose(-1, -2)[:, :, None])


def _hats(whole: Tensor, fraction: Tensor, side: int) -> Tensor:
    """Weights (B, N, K, side) of a crop's pixels for samples at whole + fraction: two neighbours each."""
    steps = torch.arange(side, device=whole.device, dtype=whole.dtype)
    distance = steps - whole[..., None]
    fraction = fraction[..., None]
    return (distance == 0) * (1 - fraction) + (distance == 1) * fraction


def level_crops(source: Pyramid, level: int, top: Tensor, left: Tensor, side: int) -> Tensor:
    """Crops of one level; see crop_runs."""
    place = (source.starts[level], *source.sizes[level])
    return crop_runs(source, tuple(torch.full((1, 1), each) for each in place), top, left, side)


def crop_runs(source: Pyramid, place: tuple[Tensor, ...], top: Tensor, left: Tensor, side: int) -> Tensor:
    """Crops of side × side pixels from (top, left), (B, N) each, border repeated: (B, N, C, side, side).

    A row of a crop is a run of memory, so whole runs are copied: a third of the time of picking pixels.
    Only those that would leave the image at the left or right are mended pixel by pixel.

    place: for each token where its level begins within a channel, its height and its width, (B, N) or (1, 1).
    """
    begin, height, width = (each[..., None] for each in place)
    channels, memory = source.images.shape[1], source.pixels
    runs = memory.as_strided((max(0, len(memory) - side + 1), side), (1, 1))  # the run that begins at each pixel
    column = left[..., None]
    start = column.clamp(min=0).minimum(width - side).clamp(min=0)  # (B, N, 1)
    rows = (top[..., None] + torch.arange(side)).clamp(min=0).minimum(height - 1)
    planes = torch.arange(len(top) * channels).view(len(top), 1, channels, 1) * source.plane
    index = planes + (begin + rows * width + start)[:, :, None]  # (B, N, C, side)
    crops = runs.index_select(0, index.flatten()).view(*index.shape, side)
    image, token = ((column != start) | (width < side))[..., 0].nonzero(as_tuple=True)
    if len(image):
        last = (width - 1).expand_as(column)[image, token]
        columns = (column[image, token] + torch.arange(side)).clamp(min=0).minimum(last) - start[image, token]
        mended = crops[image, token]
        crops[image, token] = mended.gather(-1, columns[:, None, None].expand_as(mended))
    return crops
