"""The module that is exported: images, and positions unless a placement is built in → logits and features.

It computes what the SpotViT computes, written so that a runtime without PyTorch's fast paths is quick:

- Pixels are gathered from one flat list of the batch's pixels. (`images.expand(tokens)`, which costs
  nothing in PyTorch, is a copy of the image per token in ONNX Runtime: a third of the time at 196 tokens.)
- Tokens are (B · N, D) between attentions, so that a linear layer with its bias is one Gemm node.
- Attention is ONNX's own Attention node, from opset 23 on, without the transpositions around it.
- Mean and std are in the weights of the patch projection. Interpolation is linear and its weights add
  up to one, so normalising pixels before it or folding it into what follows it is the same.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.tokens.tokenizer import Tokenizer
from spot.tokens.windows import _split

Input = Literal["uint8", "float"]
Output = Literal["logits", "pooled", "tokens"]
OUTPUTS: tuple[Output, ...] = ("logits", "pooled", "tokens")


class Graph(nn.Module):
    """A SpotViT as a file holds it. forward(images, positions) → a tuple of `outputs`.

    Args:
        model: is not changed.
        image: "uint8" takes RGB (B, H, W, 3) as decoders give it, "float" the model's own (B, C, H, W).
        positions: (N, 2) to build into the graph, which then takes images alone.
        outputs: some of logits (B, classes), pooled (B, D) and tokens (B, P + N, D).
        attention_node: write ONNX's Attention (for opset 23 and later) instead of PyTorch's.
    """

    positions: Tensor | None

    def __init__(
        self,
        model: SpotViT,
        *,
        image: Input = "uint8",
        positions: Tensor | None = None,
        outputs: Sequence[Output] = ("logits",),
        attention_node: bool = False,
    ) -> None:
        super().__init__()
        if type(model.tokenizer) is not Tokenizer:
            raise InputError(f"a model with a {type(model.tokenizer).__name__} cannot be exported; only SPoT's own")
        channels = model.vit.patch_embed.proj.in_channels
        if image == "uint8" and channels != 3:
            raise InputError(f"this model's images have {channels} channels; export it with a float input")
        self.model = copy.copy(model)  # shares all weights; only the tokenizer is another
        self.model._modules = dict(model._modules)
        config = model.data_config
        scale = (config["mean"], config["std"]) if image == "uint8" else ((0.0,) * channels, (1.0,) * channels)
        unit = 255.0 if image == "uint8" else 1.0
        self.model.tokenizer = FlatTokenizer(model.tokenizer, model.vit.patch_embed.proj, *scale, unit)
        self.image = image
        self.outputs = tuple(outputs)
        self.attention_node = attention_node
        self.register_buffer("positions", None if positions is None else positions.float()[None])

    def forward(self, images: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.image == "uint8":
            images = images.permute(0, 3, 1, 2)
        chosen = self.positions if self.positions is not None else positions
        assert chosen is not None
        x = self.encode(*self.model.embed(images, chosen))
        results: dict[str, Tensor] = {"tokens": x}
        if "pooled" in self.outputs:
            results["pooled"] = self.model.forward_head(x, pre_logits=True)
        if "logits" in self.outputs:
            results["logits"] = self.model.forward_head(x)
        return tuple(results[name] for name in self.outputs)

    def encode(self, x: Tensor, rope: Tensor | None) -> Tensor:
        """What SpotViT.encode does, on a flat list of tokens where the blocks are timm's standard ones."""
        if rope is not None or not all(is_standard(block) for block in self.model.vit.blocks):
            return self.model.encode(x, rope)
        batch, tokens, width = x.shape
        x = x.reshape(-1, width)
        for block in self.model.vit.blocks:
            x = x + block.ls1(self.attend(block.attn, block.norm1(x), batch, tokens))
            x = x + block.ls2(block.mlp(block.norm2(x)))
        return self.model.vit.norm(x).view(batch, tokens, width)

    def attend(self, attention: Any, x: Tensor, batch: int, tokens: int) -> Tensor:
        """A timm Attention on (B · N, D)."""
        qkv = attention.qkv(x).view(batch, tokens, 3 * attention.attn_dim)
        heads = attention.num_heads
        if self.attention_node and isinstance(attention.q_norm, nn.Identity):
            q, k, v = qkv.split(attention.attn_dim, -1)
            y = torch.onnx.ops.attention(q, k, v, q_num_heads=heads, kv_num_heads=heads)[0]
        else:
            q, k, v = qkv.view(batch, tokens, 3, heads, attention.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(attention.q_norm(q), attention.k_norm(k), v).transpose(1, 2)
        return attention.proj(attention.norm(y.reshape(-1, attention.attn_dim)))


class DenseGraph(Graph):
    """The plain ViT inside a SpotViT, written the same way: what an exported SpotViT is compared with."""

    kernel: Tensor
    bias: Tensor

    def __init__(self, model: SpotViT, *, attention_node: bool = True) -> None:
        super().__init__(model, attention_node=attention_node)
        tokenizer: Any = self.model.tokenizer
        windows = tokenizer.weight.unflatten(1, (model.patch_size, model.patch_size, 3))  # normalises, as above
        self.register_buffer("kernel", windows.permute(0, 3, 1, 2).contiguous())
        self.register_buffer("bias", tokenizer.bias)

    def forward(self, images: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        vit = self.model.vit
        pixels = images.permute(0, 3, 1, 2).float()
        x = F.conv2d(pixels, self.kernel, self.bias, stride=self.model.patch_size)
        x = vit.norm_pre(vit._pos_embed(vit.patch_embed.norm(x.flatten(2).transpose(1, 2))))
        return (self.model.forward_head(self.encode(x, None)),)


def is_standard(block: nn.Module) -> bool:
    """Whether a block is timm's Block with its Attention, and nothing more."""
    attention = getattr(block, "attn", None)
    return type(block) is Block and type(attention) is Attention and getattr(attention, "gate", None) is None


class FlatTokenizer(nn.Module):
    """A Tokenizer that gathers pixels from one flat list, and normalises them by its weights.

    Pixels are divided by `unit`, then mean and std apply. weight is (D, K · K · C): in the order of gathered pixels.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self, tokenizer: Tokenizer, proj: nn.Conv2d, mean: Sequence[float], std: Sequence[float], unit: float
    ) -> None:
        super().__init__()
        self.kernels = tokenizer.kernels
        weight = proj.weight.detach().double().permute(0, 2, 3, 1)
        middle, width = torch.tensor(mean).to(weight), torch.tensor(std).to(weight)
        bias = -(weight * (middle / width)).sum((1, 2, 3))
        if proj.bias is not None:
            bias = bias + proj.bias.detach()
        self.register_buffer("weight", (weight / (width * unit)).flatten(1).float())
        self.register_buffer("bias", bias.float())

    def forward(self, images: Tensor, positions: Tensor, patch_embed: Any, table: Tensor | None, *_: Any) -> Tensor:
        """Images (B, C, H, W) of any dtype and positions (B, N, 2), or (1, N, 2) for all, → tokens (B, N, D)."""
        pixels = flat_windows(images, positions, patch_embed.proj.kernel_size[0])
        tokens = F.linear(pixels.flatten(2).flatten(0, 1), self.weight, self.bias)
        tokens = patch_embed.norm(tokens).view(*pixels.shape[:2], -1)
        return tokens if table is None else tokens + self.kernels(positions) @ table


def flat_windows(images: Tensor, positions: Tensor, size: int) -> Tensor:
    """What spot.windows gives for images (B, C, H, W) of any dtype, as float32 (B, N, K, K, C)."""
    batch, channels, height, width = images.shape
    top, y = _split(positions[..., 0] * height - size / 2, height, size)
    left, x = _split(positions[..., 1] * width - size / 2, width, size)
    steps = torch.arange(size + 1, device=images.device)
    first = torch.arange(batch, device=images.device) * height  # of each image's rows
    rows = (top[..., None] + steps).clamp(0, height - 1) + first[:, None, None]
    columns = (left[..., None] + steps).clamp(0, width - 1)
    index = rows[..., :, None] * width + columns[..., None, :]
    pixels = images.permute(0, 2, 3, 1).reshape(-1, channels)
    crops = pixels.index_select(0, index.flatten()).view(*index.shape, channels).float()
    x, y = x[..., None, None, None], y[..., None, None, None]
    crops = crops[..., :-1, :] + (crops[..., 1:, :] - crops[..., :-1, :]) * x
    return crops[..., :-1, :, :] + (crops[..., 1:, :, :] - crops[..., :-1, :, :]) * y
