"""Windows in exported graphs: gathered from the flattened batch of images (B, H, W, C).

`images.expand(tokens)` is free in PyTorch, but in ONNX Runtime it copies the image for every token, and the grid
sampler there is slow. Windows of scale 1 are (K + 1)² pixels and two interpolations, as in spot.tokens.windows.
Windows of other scales are one square of at most 2K + 4 pixels a side and two products with interpolation weights.
If the placement is built in, ONNX Runtime computes pixel indices and weights once, when it opens the file.
"""

import torch
from torch import Tensor


def flat_windows(images: Tensor, positions: Tensor, size: int) -> Tensor:
    """The same as spot.windows for images (B, H, W, C) of any dtype, as float32 (B, N, C, K, K)."""
    batch, height, width, channels = images.shape
    lengths = torch.tensor([height, width], device=images.device)
    start = positions * lengths - size / 2
    # Starts within rounding error of a pixel are rounded to it, as in spot.tokens.windows, so the grid gives patches.
    pixel = start.round()
    start = torch.where((start - pixel).abs() < 8 * torch.finfo(start.dtype).eps * lengths, pixel, start)
    start = start.clamp(min=-size - 1).minimum(lengths)
    whole = start.floor()
    y, x = (start - whole)[..., None, None, None].unbind(2)  # (B, N, 1, 1, 1) each
    steps = torch.arange(size + 1, device=images.device)
    places = (whole[..., None].long() + steps).clamp(min=0).minimum(lengths[:, None] - 1)  # (B, N, 2, K + 1)
    first = torch.arange(batch, device=images.device)[:, None] * (height * width)  # index of each image's first pixel
    crops = gathered(images.flatten(), places, first, width, channels)
    crops = crops[..., :-1, :] + (crops[..., 1:, :] - crops[..., :-1, :]) * y
    return crops[..., :-1] + (crops[..., 1:] - crops[..., :-1]) * x


def gathered(memory: Tensor, places: Tensor, first: Tensor, width: int | Tensor, channels: int) -> Tensor:
    """Squares at rows and columns `places` (B, N, 2, S) of planes that begin at pixel `first`: (B, N, C, S, S)."""
    rows = (places[:, :, 0] * width + first[..., None]) * channels
    columns = torch.arange(channels, device=memory.device)[:, None] + places[:, :, 1, None] * channels
    index = rows[:, :, None, :, None] + columns[..., None, :]
    # Gathers single values: ONNX Runtime needs a third of the time that it takes to gather whole pixels.
    return memory.gather(0, index.flatten()).view(index.shape).float()


def scaled_flat_windows(images: Tensor, positions: Tensor, size: int, levels: int) -> Tensor:
    """The same as spot.windows for positions (B, N, 3), scales up to 2 ** (levels - 1), as float32 (B, N, C, K, K).

    The graph branches on the scales at run time. If all are 1 it uses flat_windows; up to 2 it needs only the image
    itself and no other level of the pyramid.
    """

    def plain(images: Tensor, positions: Tensor) -> Tensor:
        return flat_windows(images, positions[..., :2], size)

    def twice(images: Tensor, positions: Tensor) -> Tensor:
        return pyramid_windows(images, positions, size, min(levels, 2))

    def larger(images: Tensor, positions: Tensor) -> Tensor:
        return pyramid_windows(images, positions, size, levels)

    def scaled(images: Tensor, positions: Tensor) -> Tensor:
        if levels <= 2:
            return twice(images, positions)
        return torch.cond((positions[..., 2] <= 2).all(), twice, larger, (images, positions))

    return torch.cond((positions[..., 2] == 1).all(), plain, scaled, (images, positions))


def pyramid_windows(images: Tensor, positions: Tensor, size: int, levels: int, largest: float = 2.0) -> Tensor:
    """Windows of any scale: interpolated in the two nearest levels of the pyramid (spot.tokens.pyramid) and mixed.

    A pixel of the coarser level is the mean of 2 × 2 pixels of the finer. One square of the finer level thus contains
    all values needed. Interpolation in both levels is one product with weights over the square's rows and one over its
    columns, and a level is only ever read as the finer one.

    largest: the largest scale, if it is known to be below 2; the square is then smaller.
    """
    batch, height, width, channels = images.shape
    lengths = torch.tensor([height, width], device=images.device)
    scale = positions[..., 2]
    detail = scale.log2().clamp(0, levels - 1)
    below = detail.floor().clamp(max=max(0, levels - 2))
    share = (detail - below).square()
    step = torch.exp2(below)[..., None, None]  # distance between pixels of the finer level, in pixels of the image
    offsets = (torch.arange(size, device=images.device) - (size - 1) / 2) * scale[..., None]
    points = (positions[..., :2] * lengths)[..., None] + offsets[:, :, None]  # (B, N, 2, K), pixels of the image
    last = torch.ceil(lengths[:, None] / step) - 1  # (B, N, 2, 1): the last pixel after halving
    fine = (points / step - 0.5).clamp(min=0).minimum(last)  # border beyond
    coarse = (points / (2 * step) - 0.5).clamp(min=0).minimum(torch.ceil((last + 1) / 2) - 1)
    # The square begins at an even pixel, so that pairs of its pixels form pixels of the coarser level.
    begin = 2 * coarse[..., :1].floor()
    side = 2 * int((size - 1) * largest / 2) + 6
    steps = torch.arange(side, device=images.device)
    y, x = torch.stack([fine, coarse], -1).unbind(2)  # (B, N, K, 2): in both levels, like the next
    of_y, of_x = torch.stack([begin + steps, begin / 2 + steps // 2], -1).unbind(2)  # (B, N, S, 2)
    shares = torch.stack([1 - share, share / 4], -1)[:, :, None]  # a coarser pixel is the mean of 2 × 2
    # Runtimes are slow if the last dimension is short, so a product repeats both levels along 2 · S.
    levels_of = torch.arange(2 * side, device=images.device) % 2
    along = (levels_of == torch.arange(2, device=images.device)[:, None]).float()
    rows = hat(y @ along - of_y.flatten(2)[:, :, None]) * (shares @ along)  # (B, N, K, S · 2)
    columns = hat(x.mT[:, :, None] - of_x[..., None]).flatten(3)  # (B, N, S, 2 · K)
    planes = [images]
    for _ in range(levels - 2):
        planes.append(halved(halved(planes[-1].float(), 1), 2) * 0.25)
    inside: int | Tensor = 0  # offset of its level within an image's pixels
    across: int | Tensor = width  # row length of its level in pixels
    flat = images.flatten(1, 2)
    if len(planes) > 1:
        flat = torch.cat([plane.flatten(1, 2).float() for plane in planes], 1)
        numbers = torch.arange(levels - 2, device=images.device)
        areas = ((lengths[:, None] + 2**numbers - 1) // 2**numbers).prod(0)  # pixels per level but the last
        inside = ((below[..., None] > numbers).long() * areas).sum(-1)
        across = last[:, :, 1].long() + 1
    first = torch.arange(batch, device=images.device)[:, None] * flat.shape[1] + inside
    squares = gathered(flat.flatten(), (begin + steps).minimum(last).long(), first, across, channels)
    # Over columns, then over rows and both levels, without a transposition.
    narrow = squares.flatten(2, 3) @ columns  # (B, N, C · S, 2 · K)
    return rows[:, :, None] @ narrow.view(*squares.shape[:3], -1, size)


def hat(distance: Tensor) -> Tensor:
    """The weight of a pixel at a distance in linear interpolation."""
    return (1 - distance.abs()).clamp(min=0)


def halved(pixels: Tensor, axis: int) -> Tensor:
    """Sums of neighbouring pairs along an axis; an odd last element counts twice."""
    length = pixels.shape[axis]
    first = torch.arange((length + 1) // 2, device=pixels.device) * 2
    return pixels.index_select(axis, first) + pixels.index_select(axis, (first + 1).clamp(max=length - 1))
