"""A masked autoencoder on off-grid windows (He et al., 2022, with tokens at continuous positions).

The encoder is a SpotViT that processes only the visible tokens. The decoder takes their features, a
mask token for each hidden token, and the kernelized embedding of every token's position, and
reconstructs the hidden windows. After training only the encoder is kept.

`fill_decoder` loads the decoder of a file that He et al. published, such as `mae_pretrain_vit_base_full.pth`. Its
encoder is a timm ViT, which spot.load reads.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from spot.errors import InputError
from spot.models.checkpoints import refuse_misfit
from spot.models.spot_vit import SpotViT
from spot.tokens.position_embedding import KernelPositionEmbedding
from spot.tokens.windows import windows


class Reconstruction(NamedTuple):
    """Hidden windows, reconstructed and original: (B, N − V, C · K · K) each."""

    reconstructed: Tensor
    hidden: Tensor


class Decoder(nn.Module):
    """Features of visible tokens and positions of all tokens → pixels of all windows."""

    def __init__(
        self,
        embed_dim: int,
        grid_size: tuple[int, int],
        pixels: int,
        *,
        width: int,
        depth: int,
        heads: int,
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

        visible (B, V) holds the indices of the visible tokens in positions (B, N, 2).
        """
        features = self.narrow(features)
        count, width = positions.shape[1], features.shape[-1]
        tokens = self.mask_token.to(features.dtype).expand(len(features), count, width)
        tokens = tokens.scatter(1, visible[..., None].expand(-1, -1, width), features[:, prefix:])
        tokens = tokens + self.positions(positions)
        x = self.blocks(torch.cat([features[:, :prefix], tokens], 1))
        return self.pixels(self.norm(x[:, prefix:]))


class MaskedAutoencoder(nn.Module):
    """Encoder and decoder, called with images, positions and the indices of the visible positions."""

    def __init__(self, encoder: SpotViT, *, width: int = 512, depth: int = 8, heads: int = 16) -> None:
        super().__init__()
        self.encoder = encoder
        channels = encoder.vit.patch_embed.proj.in_channels
        pixels = channels * encoder.patch_size**2
        self.decoder = Decoder(encoder.embed_dim, encoder.grid_size, pixels, width=width, depth=depth, heads=heads)

    def forward(self, images: Tensor, positions: Tensor, visible: Tensor) -> Reconstruction:
        """Reconstruct the windows of images (B, C, H, W) at the positions (B, N, 2) that visible (B, V) does not list.

        Each window is reconstructed with mean 0 and variance 1.
        """
        shown = positions.take_along_dim(visible[..., None], 1)
        features = self.encoder.encode(*self.encoder.embed(images, shown))
        pixels = self.decoder(features, self.encoder.num_prefix_tokens, positions, visible)
        hidden = hidden_indices(visible, positions.shape[1])[..., None]
        target = windows(images, positions.take_along_dim(hidden, 1), self.encoder.patch_size)
        target = target.flatten(2).detach().float()
        deviation, mean = torch.std_mean(target, -1, keepdim=True)
        target = (target - mean) / (deviation.square() + 1e-6).sqrt()
        return Reconstruction(pixels.take_along_dim(hidden, 1).float(), target)


def hidden_indices(visible: Tensor, count: int) -> Tensor:
    """The indices 0 … count − 1 that are not in visible (B, V), in order: (B, count − V)."""
    mask = torch.ones(len(visible), count, dtype=torch.bool, device=visible.device).scatter(1, visible, value=False)
    # Not nonzero(), whose output size would force a GPU to synchronise.
    return mask.int().argsort(dim=1, descending=True, stable=True)[:, : count - visible.shape[1]]


# Published checkpoints: prefixes of their decoder's parameter names → ours. The position table and the order of the
# reconstructed pixels differ, and are converted below.
DECODER_NAMES = {
    "decoder_embed.": "narrow.",
    "decoder_blocks.": "blocks.",
    "decoder_norm.": "norm.",
    "decoder_pred.": "pixels.",
    "mask_token": "mask_token",
    "decoder_pos_embed": "positions.table",
}


@torch.no_grad()
def fill_decoder(decoder: Decoder, state: Mapping[str, Tensor], source: str = "the checkpoint") -> None:
    """Load a published decoder's weights into a decoder; `state` is the whole checkpoint with its original names."""
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, ours in DECODER_NAMES.items():
            if name.startswith(theirs):
                weights[ours + name.removeprefix(theirs)] = tensor.float()
    table = weights.pop("positions.table", torch.empty(0))
    cells = math.isqrt(max(0, table.shape[1] - 1)) if table.ndim == 3 else 0
    if table.ndim != 3 or table.shape[0] != 1 or cells**2 != table.shape[1] - 1 or not cells:
        raise InputError(f"{source} has no decoder_pos_embed of shape (1, 1 + cells, width), but {tuple(table.shape)}")
    if table[0, 0].any():
        raise InputError(f"decoder_pos_embed in {source} gives the class token a position; published ones do not")
    expected = {name: tensor for name, tensor in decoder.state_dict().items() if name != "positions.table"}
    try:
        refuse_misfit(f"the decoder in {source}", weights, expected)
    except InputError as error:
        depth = 1 + max((int(name.split(".")[1]) for name in weights if name.startswith("blocks.")), default=-1)
        size = f"it is {table.shape[2]} wide and {depth} blocks deep (recipe fields decoder_width, decoder_depth)"
        raise InputError(f"{error}; {size}") from error
    for name in ("pixels.weight", "pixels.bias"):  # theirs are ordered by pixel, ours by channel
        side = math.isqrt(len(weights[name]) // 3)
        weights[name] = weights[name].unflatten(0, (side, side, 3)).movedim(2, 0).flatten(0, 2)
    decoder.load_state_dict(weights, strict=False)
    decoder.positions.fit(table[0, 1:], (cells, cells))
