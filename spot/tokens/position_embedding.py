"""Embedding of continuous positions (paper, "kernelized positional embedding", after SPiT).

The embedding of a position is a linear map of Gaussian kernels centred on the cells of a grid.
A pretrained ViT's table determines that map: the kernels at the table's own positions form a matrix K,
and K⁻¹ · table reproduces the table there. The Gaussian separates into y and x, and so does K⁻¹.
The map therefore needs only two small matrices and the table:

    embedding(y, x) = (k(y) Ky⁻¹ ⊗ k(x) Kx⁻¹) · table + bias

The parameter remains the pretrained table. The embedding is exact at the table's positions and smooth
between them, and training the table changes it everywhere. Rotary backbones need no kernels: their
angles are a formula of position, evaluated here at continuous positions.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spot.errors import InputError, check_kind
from spot.tokens.positions import in_region


class GaussianKernels(nn.Module):
    """Weights of a grid's cells at continuous positions: 1 at a cell's own centre, 0 at all other centres.

    sigma is in grid cells. At 0.8 the kernels overlap enough to be smooth between cells, and little
    enough that K is well conditioned (condition number 11 along each axis of a 14 × 14 grid).
    """

    centres: Tensor
    widths: Tensor
    axis: Tensor
    inverse: Tensor

    def __init__(self, grid_size: Sequence[int], sigma: float = 0.8) -> None:
        super().__init__()
        self.grid_size = (int(grid_size[0]), int(grid_size[1]))
        check_kind("sigma", sigma, int, float)
        self.sigma = float(sigma)
        if min(self.grid_size) < 1 or not 0 < self.sigma < math.inf:
            raise InputError(f"a grid of kernels needs cells and sigma > 0, got {self.grid_size} and {sigma}")
        # Along both axes at once: rows' kernels of y, then columns' kernels of x.
        centres = torch.cat([(torch.arange(cells) + 0.5) / cells for cells in self.grid_size])
        axis = torch.tensor([0] * self.grid_size[0] + [1] * self.grid_size[1])
        widths = torch.tensor([cells / self.sigma for cells in self.grid_size])[axis]
        inverses = []
        for own in centres.split(self.grid_size):
            # Inverts the kernels with their float32 rounding errors, so that these cancel on the grid.
            kernels = torch.exp(-0.5 * ((own[:, None] - own) * (len(own) / self.sigma)).square())
            inverses.append(torch.linalg.inv(kernels.double()).float())
        for name, value in (("centres", centres), ("widths", widths), ("axis", axis)):
            self.register_buffer(name, value, persistent=False)
        self.register_buffer("inverse", torch.block_diag(*inverses), persistent=False)

    def _apply(self, fn, recurse: bool = True):
        """Follow the model's device, but keep float32: bfloat16 and float16 would round positions to pixels."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.element_size() < 4:
                self._buffers[name] = exact[name].to(buffer.device)  # type: ignore[union-attr]
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (..., 2), (y, x) fractions → weights (..., rows × columns), cells in row order.

        A scale in a third column is ignored.
        """
        distance = (positions.float().index_select(-1, self.axis) - self.centres) * self.widths
        weights = torch.exp(-0.5 * distance.square()) @ self.inverse
        y, x = weights.split(self.grid_size, -1)
        # Kernels fade beyond the outermost centres. The missing weight is spread evenly over all cells, as
        # a bias of the linear map, so that a token at the edge approaches the table's mean and not zero.
        missing = (1 - y.sum(-1, keepdim=True) * x.sum(-1, keepdim=True)) / math.prod(self.grid_size)
        return (y[..., :, None] * x[..., None, :]).flatten(-2) + missing

    def extra_repr(self) -> str:
        return f"grid_size={self.grid_size}, sigma={self.sigma}"


class KernelPositionEmbedding(nn.Module):
    """Kernelized embedding of positions (..., N, 2) → (..., N, D), with its own learnable table."""

    def __init__(self, grid_size: Sequence[int], embed_dim: int, sigma: float = 0.8) -> None:
        super().__init__()
        self.kernels = GaussianKernels(grid_size, sigma)
        self.table = nn.Parameter(torch.empty(math.prod(self.kernels.grid_size), embed_dim))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        return self.kernels(positions).to(self.table.dtype) @ self.table

    @torch.no_grad()
    def fit(self, table: Tensor, grid_size: Sequence[int] | None = None) -> "KernelPositionEmbedding":
        """Fit the embedding to a table at the table's own positions, and return self.

        table is (rows × columns, D) in row order. The fit is exact if there are at least as many
        centres as the table has cells, and a least-squares fit otherwise.
        """
        grid_size = self.kernels.grid_size if grid_size is None else (int(grid_size[0]), int(grid_size[1]))
        if tuple(table.shape) != (math.prod(grid_size), self.table.shape[1]):
            raise InputError(
                f"a table for a {grid_size[0]} × {grid_size[1]} grid must have shape "
                f"{(math.prod(grid_size), self.table.shape[1])}, got {tuple(table.shape)}"
            )
        if grid_size == self.kernels.grid_size:
            self.table.copy_(table)
        else:
            weights = self.kernels(grid_positions(grid_size).to(self.table.device)).double()
            self.table.copy_(torch.linalg.lstsq(weights.cpu(), table.double().cpu(), driver="gelsd").solution)
        return self


def grid_positions(grid_size: Sequence[int]) -> Tensor:
    """The centres of a grid's cells in row order: (rows × columns, 2), (y, x) fractions."""
    rows, columns = ((torch.arange(cells) + 0.5) / cells for cells in grid_size)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)


def rotary_embedding(rope: Any, positions: Tensor, cells: Sequence[float]) -> Tensor:
    """The angles of a timm rotary module at continuous positions (B, N, 2), in the layout its blocks expect.

    cells is the image's size in patches, (H / K, W / K). Cell j of timm's grid is position
    (j + 0.5) / cells, so its integer coordinates become `position * cells - 0.5`. For tokens with a region
    (B, N, 7) coordinates are relative to the region, whose size is counted in windows of the token's scale.
    Returns (B, 1, N, 2 · head_dim), or (depth, B, heads, N, 2 · head_dim) for mixed frequencies.
    """
    kind = type(rope).__name__
    if kind not in ROTARY:
        raise InputError(f"rotary embedding {kind} has no continuous form here; use one of {', '.join(ROTARY)}")
    size = torch.tensor(cells, dtype=positions.dtype, device=positions.device)
    if positions.shape[-1] == 7:
        size = size * positions[..., 5:] / positions[..., 2:3]  # (B, N, 2)
    coordinates = in_region(positions) * size - 0.5
    if kind == "RotaryEmbeddingDinoV3":
        # timm counts from the cell's edge and normalises to [-1, 1]; always (y, x).
        whole = {"max": size.amax(-1, True), "min": size.amin(-1, True), "separate": size}[rope.normalize_coords]
        angles = 2 * ((coordinates + 0.5 + rope.grid_offset) / whole) - 1
        angles = 2 * math.pi * angles[..., None] / rope.periods
        return _sin_cos(angles.flatten(-2), half=rope.rotate_half)[:, None]
    if rope.grid_indexing == "xy":
        coordinates, size = coordinates.flip(-1), size.flip(-1)
    if kind == "RotaryEmbeddingMixed":
        first, second = (part[None, :, None, :, None] for part in coordinates.unbind(-1))
        frequencies = rope.freqs.float()[:, :, None, :, None]  # (2, depth, 1, heads, 1, head_dim / 2)
        return _sin_cos(first * frequencies[0] + second * frequencies[1], half=False).to(rope.freqs.dtype)
    coordinates = 2 * coordinates / (size - 1) - 1 if rope.in_pixels else coordinates + rope.grid_offset
    if rope.ref_feat_shape is not None:
        reference = tuple(rope.ref_feat_shape)[:: -1 if rope.grid_indexing == "xy" else 1]
        coordinates = coordinates / size * torch.tensor(reference, dtype=size.dtype, device=size.device)
    bands = rope._compute_bands(device=positions.device, dtype=torch.float32)
    return _sin_cos((coordinates[..., None] * bands).flatten(-2), half=rope.rotate_half)[:, None]


ROTARY = ("RotaryEmbeddingCat", "RotaryEmbeddingDinoV3", "RotaryEmbeddingMixed")


def _sin_cos(angles: Tensor, *, half: bool) -> Tensor:
    """Angles (..., head_dim / 2) → sines then cosines (..., 2 · head_dim), each angle twice."""
    angles = torch.cat([angles, angles], -1) if half else angles.repeat_interleave(2, -1)
    return torch.cat([angles.sin(), angles.cos()], -1)
