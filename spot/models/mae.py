"""A masked autoencoder on off-grid windows (He et al., 2022, with tokens at continuous positions).

The encoder is a SpotViT that reads only the visible tokens. The decoder gets what it said of
them, a mask token for each hidden one, and the kernelized embedding of every token's position,
and reconstructs the hidden windows. After training only the encoder is kept.
"""

from typing import NamedTuple

import torch
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.tokens.position_embedding import KernelPositionEmbedding
from spot.tokens.windows import windows


class Reconstruction(NamedTuple):
    """Hidden windows as reconstructed and as they are: (B, N − V, C · K · K) each."""

    reconstructed: Tensor
    hidden: Tensor


class Decoder(nn.Module):
    """Visible features and all positions → windows' pixels."""

    def __init__(
        self,
        embed_dim: int,
        grid_size: tuple[int, int],
        pixels: int,
        *,
        width: int = 512,
        depth: int = 8,
        heads: int = 16,
    ) -> None:
        super().__init__()
        if width % heads:
            raise InputError(f"a decoder {width} wide cannot have {heads} heads; width must be a multiple of heads")
        self.narrow = nn.Linear(embed_dim, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = KernelPositionEmbedding(grid_size, width)
        self.blocks = nn.Sequential(*[Block(width, heads, qkv_bias=True) for _ in range(depth)])
        self.norm = LayerNorm(width)
        self.pixels = nn.Linear(width, pixels)
        nn.init.normal_(self.mask_token, std=0.02)

    def no_weight_decay(self) -> set[str]:
        return {"mask_token", "positions.table"}

    def forward(self, features: Tensor, prefix: int, positions: Tensor, visible: Tensor) -> Tensor:
        """Features (B, P + V, D) of the visible tokens → pixels of all N tokens (B, N, pixels).

        visible (B, V) holds the numbers of the visible tokens among positions (B, N, 2).
        """
        known = self.narrow(features)
        count, width = positions.shape[1], known.shape[-1]
        tokens = self.mask_token.to(known.dtype).expand(len(known), count, width)
        tokens = tokens.scatter(1, visible[..., None].expand(-1, -1, width), known[:, prefix:])
        tokens = tokens + self.positions(positions)
        x = self.blocks(torch.cat([known[:, :prefix], tokens], 1))
        return self.pixels(self.norm(x[:, prefix:]))


class MaskedAutoencoder(nn.Module):
    """Encoder and decoder; called with images, positions and which of them are visible."""

    def __init__(self, encoder: SpotViT, *, width: int = 512, depth: int = 8, heads: int = 16) -> None:
        super().__init__()
        self.encoder = encoder
        channels = encoder.vit.patch_embed.proj.in_channels
        pixels = channels * encoder.patch_size**2
        self.decoder = Decoder(encoder.embed_dim, encoder.grid_size, pixels, width=width, depth=depth, heads=heads)

    def forward(self, images: Tensor, positions: Tensor, visible: Tensor, *, normalize: bool = True) -> Reconstruction:
        """Reconstruct the tokens of images (B, C, H, W) at positions (B, N, 2) that are not among visible (B, V).

        normalize: hidden windows are to be reconstructed with mean 0 and variance 1 each.
        """
        seen = positions.take_along_dim(visible[..., None], 1)
        features = self.encoder.encode(*self.encoder.embed(images, seen))
        pixels = self.decoder(features, self.encoder.num_prefix_tokens, positions, visible)
        hidden = hidden_of(visible, positions.shape[1])[..., None]
        truth = windows(images, positions.take_along_dim(hidden, 1), self.encoder.patch_size)
        truth = truth.flatten(2).detach().float()
        if normalize:
            deviation, mean = torch.std_mean(truth, -1, keepdim=True)
            truth = (truth - mean) / (deviation.square() + 1e-6).sqrt()
        return Reconstruction(pixels.take_along_dim(hidden, 1).float(), truth)


def hidden_of(visible: Tensor, count: int) -> Tensor:
    """The numbers 0 … count − 1 that are not in visible (B, V), in order: (B, count − V)."""
    mask = torch.ones(len(visible), count, dtype=torch.bool, device=visible.device).scatter(1, visible, value=False)
    # Not nonzero(), for whose size a GPU would have to be waited for.
    return mask.int().argsort(dim=1, descending=True, stable=True)[:, : count - visible.shape[1]]
