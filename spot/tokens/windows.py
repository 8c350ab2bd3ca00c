"""Bilinear windows at continuous positions (paper, "Subpixel Placement of Tokens").

A window is K × K samples one pixel apart, centred on its position. Positions are (y, x) as a
fraction of image height and width: 0 is the upper or left edge, 1 the lower or right edge, and
the centre of pixel i is (i + 0.5) / H. Outside the image the border is repeated.

All samples of a window share one fractional offset. A window is therefore an integer crop of
(K + 1)² pixels followed by two one-dimensional interpolations. This is cheaper than a general
grid sampler, and exact if the offset is zero: on the ViT's own grid the windows are its patches.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spot.errors import InputError, check_kind
from spot.tokens.positions import COLUMNS
from spot.tokens.pyramid import Pyramid, pyramid, scale_range, scaled_reader, scaled_windows, traced


def windows(images: Tensor | Pyramid, positions: Tensor, size: int, scale: float | Tensor | None = None) -> Tensor:
    """Read a K × K window of every image (B, C, H, W) at every position (B, N, 2 or 3) → (B, N, C, K, K).

    Differentiable in images, positions and scale. The result has the images' dtype.

    Args:
        images: floating point (B, C, H, W), or their Pyramid, which can be built once for many calls.
        positions: float32 (or float64) (B, N, 2), (y, x) as a fraction of height and width; or (B, N, 3)
            with each window's scale as the third number; or (B, N, 7), whose region has no effect here.
        size: K, the number of samples along each side.
        scale: distance between samples in pixels, so that a window spans `scale * size` pixels: a number,
            or a tensor that broadcasts to (B, N), instead of a third column. Above 1 samples come
            from the image's pyramid, without aliasing (spot/tokens/pyramid.py).
    """
    levels = images if isinstance(images, Pyramid) else Pyramid((images,))
    pixels = levels.levels[0]
    check(pixels, positions, size)
    positions = positions.to(torch.promote_types(positions.dtype, torch.float32))
    scales = _scales(positions, scale)
    positions = positions[..., :2]
    if scales is None:
        return _at_level(levels, 0, positions, size)
    known = scale_range(scales, pixels, size)
    level = None if known is None or scales.requires_grad else _one_level(*known)
    if not isinstance(images, Pyramid) and level != 0:
        levels = pyramid(pixels, size, None if known is None else known[1])
    if level is not None:
        return _at_level(levels, level, positions, size)
    return scaled_windows(levels, positions, scales, size).to(pixels.dtype)


def fixed_windows(positions: Tensor, shape: tuple[int, int], size: int) -> Callable[[Tensor], Tensor]:
    """A function that returns the windows of CPU images (B, C, H, W) of this shape at shared positions (N, 2 or 3).

    The result equals that of `windows` bit for bit. Values that depend only on positions are computed here, once.
    """
    scales = positions[:, 2] if positions.shape[1] > 2 else torch.ones_like(positions[:, 0])
    low, high = (float(each) for each in scales.aminmax())
    level, places = _one_level(low, high), positions[None, :, :2]
    if level is not None:
        lengths = shape
        for _ in range(level):
            lengths = ((lengths[0] + 1) // 2, (lengths[1] + 1) // 2)
        starts = _starts(places, shape, lengths, level, size)

        def read_level(images: Tensor) -> Tensor:
            levels = pyramid(images, size, high) if level else Pyramid((images,))
            top, left, fraction_y, fraction_x = (each.expand(images.shape[0], -1) for each in starts)
            return _from_starts(levels.levels[level], top, left, fraction_y, fraction_x, size, gradient=False)

        return read_level
    read = scaled_reader(places, scales[None], shape, size, max(0, math.ceil(math.log2(max(high, 1)) - 1e-6)))
    return lambda images: read(pyramid(images, size, high)).to(images.dtype)


def _at_level(levels: Pyramid, level: int, positions: Tensor, size: int) -> Tensor:
    """Windows whose samples are one pixel of a level apart: integer crops and two interpolations."""
    images, (height, width) = levels.levels[level], levels.levels[0].shape[-2:]
    starts = _starts(positions, (height, width), tuple(images.shape[-2:]), level, size)
    return _from_starts(images, *starts, size, gradient=torch.is_grad_enabled() and positions.requires_grad)


def _starts(
    positions: Tensor, shape: tuple[int, int], lengths: tuple[int, ...], level: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first row and column of each window on a level of `lengths` pixels, and the fractional offsets from them."""
    # Not from `lengths`: a level of an image with odd sides is slightly longer than the image divided by 2**level.
    full_height, full_width = (length / 2**level for length in shape)
    top, fraction_y = _split(positions[..., 0] * full_height - size / 2, lengths[0], size)
    left, fraction_x = _split(positions[..., 1] * full_width - size / 2, lengths[1], size)
    return top, left, fraction_y, fraction_x


def _from_starts(
    images: Tensor, top: Tensor, left: Tensor, fraction_y: Tensor, fraction_x: Tensor, size: int, *, gradient: bool
) -> Tensor:
    """Windows from their first rows and columns. gradient: whether positions need a gradient."""
    if _plain(images) and images.shape[-1] > size:
        if not gradient:
            return _in_chunks(images, top, left, fraction_y, fraction_x, size)
        crops = _crop_runs(images, top, left, size + 1)
    else:
        steps = torch.arange(size + 1, device=images.device)
        crops = _crop(images, top[..., None] + steps, left[..., None] + steps)
    return _Lerp.apply(crops, fraction_y, fraction_x)


def _scales(positions: Tensor, scale: float | Tensor | None) -> Tensor | None:
    """The scale of each window (B, N) from the third column or the argument; None if neither is given."""
    if positions.shape[-1] > 2:
        if scale is not None:
            raise InputError(
                "positions have a scale as their third column; give scale there or as an argument, not both"
            )
        return positions[..., 2]
    if scale is None:
        return None
    check_kind("scale", scale, int, float, Tensor)
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=positions.dtype, device=positions.device)
    fits = all(one in (1, other) for one, other in zip(scale.shape[::-1], positions.shape[1::-1], strict=False))
    if scale.ndim > 2 or not fits or scale.is_complex():
        raise InputError(
            f"scale must be a number or broadcast to (B, N) = {tuple(positions.shape[:2])}, "
            f"got shape {tuple(scale.shape)}"
        )
    return scale.to(positions.dtype).expand(positions.shape[:2])


def _one_level(low: float, high: float) -> int | None:
    """The level that matches all windows exactly, given their smallest and largest scale; None if there is none."""
    level = math.log2(high)
    return int(level) if low == high and level >= 0 and level == int(level) else None


def check(images: Tensor, positions: Tensor, size: int = 1) -> None:
    """Refuse types, shapes and devices that `windows` does not support."""
    check_kind("images", images, Tensor)
    check_kind("positions", positions, Tensor)
    check_kind("size", size, int)
    if images.ndim != 4:
        raise InputError(
            f"images must have shape (B, C, H, W), got {tuple(images.shape)}; for one image use images[None]"
        )
    if 0 in images.shape[1:]:
        raise InputError(f"images must have at least one pixel, got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise InputError(f"images must be floating point, got {images.dtype}; normalise them as the model expects")
    if positions.ndim != 3 or positions.shape[-1] not in COLUMNS:
        advice = "; for the authors' placements use positions[:, :, 0, 0]" if positions.ndim == 5 else ""
        advice = "; add a batch dimension with positions.expand(B, -1, -1)" if positions.ndim == 2 else advice
        raise InputError(
            f"positions must have shape (B, N, 2), (B, N, 3) or (B, N, 7), got {tuple(positions.shape)}{advice}"
        )
    if positions.shape[0] != images.shape[0]:  # not len(): it would fix the batch when traced
        raise InputError(f"positions are for {len(positions)} images, but there are {len(images)}; pass one each")
    if positions.dtype not in (torch.float32, torch.float64):
        raise InputError(f"positions must be float32, got {positions.dtype}; coarser types cannot tell subpixels apart")
    if positions.device != images.device:
        raise InputError(f"positions are on {positions.device}, images on {images.device}; move one to the other")
    if size < 1:
        raise InputError(f"size must be at least 1 sample, got {size}")


def _split(start: Tensor, length: int, size: int) -> tuple[Tensor, Tensor]:
    """Starts in pixels → the integer pixel, and the fraction beyond it."""
    # A start within rounding error of a pixel is rounded to it: (j + 0.5) / 14 * 224 is not always an
    # integer in float32, and the grid must give patches bit for bit. The gradient bypasses the rounding.
    pixel = start.detach().round()
    close = (start.detach() - pixel).abs() < 8 * torch.finfo(start.dtype).eps * length
    start = torch.where(close, pixel + (start - start.detach()), start)
    start = start.clamp(-size - 1, length)  # further out every sample is the same border pixel
    whole = start.detach().floor()
    return whole.long(), start - whole


def _crop(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels at rows (B, N, R) × columns (B, N, S) of (B, C, H, W), border repeated → (B, N, C, R, S)."""
    channels, height, width = images.shape[1:]
    count, shape = rows.shape[1], (rows.shape[-1], columns.shape[-1])
    index = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
    index = index.flatten(2)[:, :, None].expand(-1, -1, channels, -1)
    return images.flatten(2)[:, None].expand(-1, count, -1, -1).gather(3, index).unflatten(3, shape)


def _plain(images: Tensor) -> bool:
    """Whether these are plain CPU tensors: no gradient, no tracing, no transform."""
    return images.device.type == "cpu" and not images.requires_grad and not traced()


def _crop_runs(images: Tensor, top: Tensor, left: Tensor, side: int) -> Tensor:
    """The same as _crop for side × side pixels from (top, left), (B, N) each, in a third of its time on a CPU.

    A row of a crop is contiguous in memory, so whole rows are copied. Only crops that extend beyond
    the left or right edge are corrected pixel by pixel.
    """
    batch, channels, height, width = images.shape
    memory = images.contiguous().view(-1)
    runs = memory.as_strided((max(0, len(memory) - side + 1), side), (1, 1))  # the run that begins at each pixel
    start = left.clamp(0, width - side)
    rows = (top[..., None] + torch.arange(side)).clamp(0, height - 1)[:, :, None]
    planes = torch.arange(batch * channels).view(batch, 1, channels, 1)
    index = (planes * height + rows) * width + start[..., None, None]  # (B, N, C, side)
    crops = runs.index_select(0, index.flatten()).view(*index.shape, side)
    image, token = (left != start).nonzero(as_tuple=True)
    if len(image):
        columns = (left[image, token, None] + torch.arange(side)).clamp(0, width - 1) - start[image, token, None]
        mended = crops[image, token]
        crops[image, token] = mended.gather(-1, columns[:, None, None].expand_as(mended))
    return crops


CHUNK = 4 * 2**20  # bytes of crops at a time: allocating larger buffers takes longer than filling them


def _in_chunks(images: Tensor, top: Tensor, left: Tensor, fraction_y: Tensor, fraction_x: Tensor, size: int) -> Tensor:
    """Windows without gradients, computed for a few images at a time so that memory is reused."""
    batch, tokens = top.shape
    channels, dtype = images.shape[1], fraction_y.dtype
    result = torch.empty(batch, tokens, channels, size, size, dtype=dtype)
    step = max(1, CHUNK // max(1, tokens * channels * (size + 1) ** 2 * dtype.itemsize))
    for begin in range(0, batch, step):
        part = slice(begin, begin + step)
        crops = _crop_runs(images[part], top[part], left[part], size + 1)
        _shifted(crops.to(dtype), fraction_y[part], fraction_x[part], out=result[part])
    return result.to(images.dtype)


def _shifted(crops: Tensor, fraction_y: Tensor, fraction_x: Tensor, out: Tensor | None = None) -> Tensor:
    """Crops (B, N, C, K+1, K+1) moved by fractions (B, N) of a pixel → (B, N, C, K, K)."""
    y, x = fraction_y[..., None, None, None], fraction_x[..., None, None, None]
    rows = torch.lerp(crops[..., :-1], crops[..., 1:], x)
    return torch.lerp(rows[..., :-1, :], rows[..., 1:, :], y, out=out)


class _Lerp(torch.autograd.Function):
    """Crops (B, N, C, K+1, K+1) shifted by fractions (B, N) of a pixel → (B, N, C, K, K).

    Autograd would take twice as long. Here every gradient is a combination of the four inner
    products of the incoming gradient with the crop's four shifted views.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(crops: Tensor, fraction_y: Tensor, fraction_x: Tensor) -> Tensor:
        wide = crops.to(fraction_y.dtype)  # interpolate bfloat16 images in float32
        return _shifted(wide, fraction_y, fraction_x).to(crops.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        crops, fraction_y, fraction_x = ctx.saved_tensors
        gradient = gradient.to(fraction_y.dtype)
        wide = crops.to(fraction_y.dtype)
        for_crops = for_y = for_x = None
        size = gradient.shape[-1]
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            # One product at a time: all four at once would need the memory of four window tensors.
            a, b, c, d = (
                (gradient * wide[..., top : top + size, left : left + size]).flatten(2).sum(2)
                for top in (0, 1)
                for left in (0, 1)
            )
            for_y = torch.lerp(c - a, d - b, fraction_x)
            for_x = torch.lerp(b - a, d - c, fraction_y)
        if ctx.needs_input_grad[0]:
            y, x = fraction_y[..., None, None, None], fraction_x[..., None, None, None]
            pad = torch.nn.functional.pad
            rows = pad(gradient * (1 - y), (0, 0, 0, 1)) + pad(gradient * y, (0, 0, 1, 0))
            for_crops = (pad(rows * (1 - x), (0, 1)) + pad(rows * x, (1, 0))).to(crops.dtype)
        return for_crops, for_y, for_x
