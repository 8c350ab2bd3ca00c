"""The geometry of the SPoT authors' published weights, which differs from the paper's text.

Used only for their checkpoints (spot/models/checkpoints.py); everything else uses Tokenizer.
With positions (y, x) in [0, 1] and images H × W:

- sample j of K is at pixel coordinate `position · H + linspace(−r, r, K)[j] · H`, r = K / (H + W),
  where pixel i is at coordinate i: no half-pixel shift, and a step of K / (K − 1) pixels;
- neighbours are clamped to the image before their weights are computed, so samples outside are zero;
- a fourth channel holds a Gaussian of the position over the K × K window, of width n_sigma · K / (H + W),
  divided by its maximum over the whole batch, so tokens depend slightly on the other images of the batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spot.errors import InputError
from spot.tokens.windows import check_inputs, crop


class AuthorsTokenizer(nn.Module):
    """Tokens as the authors' code makes them: a linear map of RGB and position channels."""

    def __init__(self, patch_size: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        # Their single Linear(4 K² → D), split in two: timm's patch projection is the RGB part, this is the rest.
        self.position = nn.Linear(patch_size**2, embed_dim, bias=False)
        self.n_sigma = nn.Parameter(torch.tensor(1.0).expm1().log())  # softplus of this is 1

    def forward(self, images: Tensor, positions: Tensor, patch_embed: Any, table: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) and positions (B, N, 2) → tokens (B, N, D)."""
        if positions.shape[-1] != 2:
            raise InputError("the authors' checkpoints read windows of one size; give positions (B, N, 2)")
        check_inputs(images, positions, self.patch_size)
        projection = patch_embed.proj
        pixels = self.windows(images, positions).flatten(2).to(projection.weight.dtype)
        tokens = F.linear(pixels, projection.weight.flatten(1), projection.bias)
        channel = self.position_channel(positions, images.shape[-2:]).flatten(2)
        return tokens + self.position(channel.to(self.position.weight.dtype))

    def windows(self, images: Tensor, positions: Tensor) -> Tensor:
        """The K × K samples of each token: (B, N, C, K, K)."""
        size = images.shape[-2:]
        offsets = torch.linspace(-1, 1, self.patch_size, device=images.device) * self.patch_size / sum(size)
        pixels, weights = [], []
        for axis, length in enumerate(size):
            coordinate = (positions[..., axis, None] + offsets) * length
            below = coordinate.detach().floor().clamp(0, length - 1)
            above = (coordinate.detach().floor() + 1).clamp(0, length - 1)
            pixels.append(torch.cat([below, above], -1).long())
            weights.append((above - coordinate, coordinate - below))
        corners = crop(images, *pixels)
        left, right = corners.chunk(2, -1)
        rows = left * weights[1][0][:, :, None, None, :] + right * weights[1][1][:, :, None, None, :]
        upper, lower = rows.chunk(2, -2)
        return upper * weights[0][0][:, :, None, :, None] + lower * weights[0][1][:, :, None, :, None]

    def position_channel(self, positions: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
        """The Gaussian of each position over the window, (B, N, K, K). Its maximum over the batch is 1."""
        sigma = F.softplus(self.n_sigma.float()) * self.patch_size / sum(size)
        steps = torch.linspace(0, 1, self.patch_size, device=positions.device)
        distance = (positions[..., None] - steps).square()  # (B, N, 2, K)
        channel = torch.exp(-(distance[..., 0, :, None] + distance[..., 1, None, :]) / (2 * sigma**2))
        return channel / channel.max()
