"""Bilinear windows at continuous positions (paper, "Subpixel Placement of Tokens").

A window is K × K samples one pixel apart, centred on its position. Positions are (y, x) as a
fraction of image height and width: 0 is the upper or left edge, 1 the lower or right edge, and
the centre of pixel i is (i + 0.5) / H. Outside the image the border is repeated.

All samples of a window share one fractional offset. A window is therefore an integer crop of
(K + 1)² pixels followed by two one-dimensional interpolations. This is cheaper than a general
grid sampler, and exact if the offset is zero: on the ViT's own grid the windows are its patches.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spot.errors import InputError, check_kind
from spot.tokens.positions import COLUMNS
from spot.tokens.pyramid import can_read, levels_needed, pyramid, scaled_reader

MAX_SIZE = 10_000  # samples along each side of a window


def windows(images: Tensor, positions: Tensor, size: int) -> Tensor:
    """Read a K × K window of every image (B, C, H, W) at every position → (B, N, C, K, K).

    Differentiable in images, positions and scale. The result has the images' dtype.

    Args:
        images: floating point (B, C, H, W).
        positions: float32 (or float64) (B, N, 2), (y, x) as a fraction of height and width; or (B, N, 3) with each
            window's scale, the distance between its samples in pixels, so that it spans `scale * size` pixels. Above 1
            samples come from the image's pyramid, without aliasing (spot/tokens/pyramid.py). The region in positions
            (B, N, 7) has no effect here.
        size: K, the number of samples along each side.
    """
    check_inputs(images, positions, size)
    return window_reader(positions, images.shape[-2:], size)(images)


def window_reader(positions: Tensor, shape: Sequence[int], size: int) -> Callable[[Tensor], Tensor]:
    """A function that reads the windows at these positions from images (B, C, H, W) of this shape, (H, W).

    Everything that depends only on positions is computed here, once. Positions of one image, (1, N, ...), serve
    every image of a batch.
    """
    coarsest, one_level = (0, True) if positions.shape[-1] == 2 else levels_needed(positions[..., 2], shape, size)
    if not one_level:
        read = scaled_reader(positions, shape, size, coarsest)
        return lambda images: read(pyramid(images, coarsest)).to(images.dtype)
    starts = _starts(positions, shape, coarsest, size)

    def read_level(images: Tensor) -> Tensor:
        top, left, y, x = (start.expand(images.shape[0], -1) for start in starts)
        return _from_starts(pyramid(images, coarsest)[-1], (top, left, y, x), size)

    return read_level


Starts = tuple[Tensor, Tensor, Tensor, Tensor]  # of windows (B, N): first row and column, and the fractions beyond them


def _starts(positions: Tensor, shape: Sequence[int], level: int, size: int) -> Starts:
    """Where the windows begin on a level of an image's pyramid."""
    # Levels are rounded up: one of an image with odd sides is slightly longer than the image divided by 2**level.
    fractions = []
    for axis, length in enumerate(shape):
        start = positions[..., axis] * (length / 2**level) - size / 2
        fractions.append(_split(start, -(-length // 2**level), size))
    (top, fraction_y), (left, fraction_x) = fractions
    return top, left, fraction_y, fraction_x


def _from_starts(images: Tensor, starts: Starts, size: int) -> Tensor:
    """The windows (B, N, C, K, K) that begin there."""
    top, left, fraction_y, fraction_x = starts
    if can_read(images) and not images.requires_grad and images.shape[-1] > size:
        if not (torch.is_grad_enabled() and fraction_y.requires_grad):
            return _in_chunks(images, starts, size)
        crops = _crop_runs(images, top, left, size + 1)
    else:
        steps = torch.arange(size + 1, device=images.device)
        crops = crop(images, top[..., None] + steps, left[..., None] + steps)
    return _Lerp.apply(crops, fraction_y, fraction_x)


def check_inputs(images: Tensor, positions: Tensor, size: int) -> None:
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
        raise InputError(
            f"positions must be float32, got {positions.dtype}; coarser types cannot represent subpixel positions"
        )
    if positions.device != images.device:
        raise InputError(f"positions are on {positions.device}, images on {images.device}; move one to the other")
    if not 1 <= size <= MAX_SIZE:
        raise InputError(f"size must be at least 1 sample and at most {MAX_SIZE}, got {size}")


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


def crop(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels at rows (B, N, R) × columns (B, N, S) of (B, C, H, W), border repeated → (B, N, C, R, S)."""
    channels, height, width = images.shape[1:]
    count, shape = rows.shape[1], (rows.shape[-1], columns.shape[-1])
    index = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
    index = index.flatten(2)[:, :, None].expand(-1, -1, channels, -1)
    return images.flatten(2)[:, None].expand(-1, count, -1, -1).gather(3, index).unflatten(3, shape)


def _crop_runs(images: Tensor, top: Tensor, left: Tensor, side: int) -> Tensor:
    """The same as crop for side × side pixels from (top, left), (B, N) each, in a third of its time on a CPU.

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


def _in_chunks(images: Tensor, starts: Starts, size: int) -> Tensor:
    """Windows without gradients, computed for a few images at a time so that memory is reused."""
    batch, tokens = starts[0].shape
    channels, dtype = images.shape[1], starts[2].dtype
    result = torch.empty(batch, tokens, channels, size, size, dtype=dtype)
    step = max(1, CHUNK // max(1, tokens * channels * (size + 1) ** 2 * dtype.itemsize))
    for begin in range(0, batch, step):
        part = slice(begin, begin + step)
        top, left, fraction_y, fraction_x = (each[part] for each in starts)
        crops = _crop_runs(images[part], top, left, size + 1)
        _shifted(crops.to(dtype), fraction_y, fraction_x, out=result[part])
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
