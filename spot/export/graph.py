"""The module that is exported: images, and positions unless a placement is built in → logits and features.

It computes what the SpotViT computes, written so that a runtime without PyTorch's fast paths is quick:

- Pixels are gathered from one flat list of the batch's numbers (spot.export.flat).
- Tokens are (B · N, D) between attentions, so that a linear layer with its bias is one Gemm node.
- Attention is ONNX's own Attention node, from opset 23 on, without the transpositions around it.
- Mean and std are in the weights of the patch projection. Interpolation is linear and its weights add
  up to one, so normalising pixels before it or folding it into what follows it is the same.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from spot.errors import InputError
from spot.export.flat import flat_windows, pyramid_windows, scaled_flat_windows
from spot.models.spot_vit import SpotViT
from spot.placement.policy import Policy
from spot.placement.sizes import resolve_scale, sized
from spot.tokens.tokenizer import Tokenizer

Input = Literal["uint8", "float"]
Output = Literal["logits", "pooled", "tokens"]
OUTPUTS: tuple[Output, ...] = ("logits", "pooled", "tokens")


class Graph(nn.Module):
    """A SpotViT as a file holds it. forward(images, positions) → a tuple of `outputs`.

    Args:
        model: is not changed.
        image: "uint8" takes RGB (B, H, W, 3) as decoders give it, "float" the model's own (B, C, H, W).
        positions: (N, 2 or 3) to build into the graph, which then takes images alone.
        sizes: positions are (B, N, 3), with a scale each.
        outputs: some of logits (B, classes), pooled (B, D) and tokens (B, P + N, D).
        attention_node: write ONNX's Attention (for opset 23 and later) instead of PyTorch's.
        policy: a learned prior to build in, with the model's tokens; images are then of the model's own size.
    """

    positions: Tensor | None

    def __init__(
        self,
        model: SpotViT,
        *,
        image: Input = "uint8",
        positions: Tensor | None = None,
        sizes: bool = False,
        outputs: Sequence[Output] = ("logits",),
        attention_node: bool = False,
        policy: Policy | None = None,
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
        self.placement = None if policy is None else LearnedPlacement(model, policy, image)
        if self.placement is not None:
            sizes = self.placement.sizes
        if positions is not None and positions.shape[-1] == 3 and bool((positions[:, 2] == 1).all()):
            positions = positions[:, :2]
        self.sizes = sizes if positions is None else positions.shape[-1] == 3
        largest = max(model.img_size) / model.patch_size if positions is None else float(positions[:, -1].max())
        # As many as spot.tokens.pyramid builds for windows up to this scale; larger images have no more.
        self.levels = 1 + max(0, math.ceil(math.log2(max(largest, 1)) - 1e-6)) if self.sizes else None
        given = positions is None and self.placement is None
        self.model.tokenizer = FlatTokenizer(model, *scale, unit, self.levels, given)
        self.image = image
        self.outputs = tuple(outputs)
        self.attention_node = attention_node
        self.register_buffer("positions", None if positions is None else positions.float()[None])

    def forward(self, images: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.image == "uint8":
            images = images.permute(0, 3, 1, 2)
        chosen = positions if self.positions is None else self.positions
        if self.placement is not None:
            chosen = self.placement(images)
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


class LearnedPlacement(nn.Module):
    """A policy and its budget: the graph's images (B, C, H, W) → positions (B, N, 2), or with scales (B, N, 3)."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: SpotViT, policy: Policy, image: Input) -> None:
        super().__init__()
        blank = torch.zeros(1, model.data_config["input_size"][0], *model.img_size)
        self.sizes = model.place(blank, prior=policy).shape[-1] == 3  # and refuses what cannot be
        self.scale = resolve_scale(model.scale, model.tokens, blank, model.patch_size)
        self.policy, self.look, self.tokens, self.image = policy, policy.look, model.tokens, image
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(model.data_config[name])[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """As SpotViT.place, of bytes or of normalised pixels."""
        if self.image == "uint8":
            images = (images.float() / 255 - self.mean) / self.std
        positions = self.policy.place(self.policy.maps(images), images, self.tokens)
        return positions if positions.shape[-1] == 3 else sized(positions, self.scale)


class DenseGraph(Graph):
    """The plain ViT inside a SpotViT, written the same way: what an exported SpotViT is compared with."""

    kernel: Tensor
    bias: Tensor

    def __init__(self, model: SpotViT, *, attention_node: bool = True) -> None:
        super().__init__(model, attention_node=attention_node)
        tokenizer: Any = self.model.tokenizer
        self.register_buffer("kernel", tokenizer.weight.view_as(model.vit.patch_embed.proj.weight))  # normalises too
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
    """A Tokenizer in few nodes: it gathers pixels from one flat list, and normalises them by its weights.

    Pixels are divided by `unit`, then mean and std apply. weight is (D, C · K · K). The position embedding is the
    kernels at a position times `table`, which has the kernels' inverse in it, plus `offset`, to which kernels fade
    outside the grid.
    """

    weight: Tensor
    bias: Tensor
    pick: Tensor
    centres: Tensor
    table: Tensor | None
    offset: Tensor | None

    def __init__(
        self,
        model: SpotViT,
        mean: Sequence[float],
        std: Sequence[float],
        unit: float,
        levels: int | None,
        given: bool,
    ) -> None:
        """
        Args:
            levels: of the pyramid that windows are read from, or None where all are of scale 1.
            given: positions are an input, so that all scales may be 1 after all.
        """
        super().__init__()
        self.levels, self.given = levels, given
        proj: Any = model.vit.patch_embed.proj
        weight = proj.weight.detach().double()
        middle, width = (torch.tensor(each).to(weight)[:, None, None] for each in (mean, std))
        bias = -(weight * (middle / width)).sum((1, 2, 3))
        if proj.bias is not None:
            bias = bias + proj.bias.detach()
        self.register_buffer("weight", (weight / (width * unit)).flatten(1).float())
        self.register_buffer("bias", bias.float())
        kernels: Any = model.tokenizer.kernels
        self.rows, self.columns = kernels.grid_size
        # One product gives y at all rows' kernels and x at all columns', in units in which a kernel is exp(-d²).
        units = [cells / kernels.sigma * 0.5**0.5 for cells in kernels.grid_size]
        pick = torch.zeros(2, self.rows + self.columns)
        pick[0, : self.rows], pick[1, self.rows :] = units
        self.register_buffer("pick", pick)
        self.register_buffer("centres", torch.cat([kernels.centres_y, kernels.centres_x]) * pick.sum(0))
        table = model.vit.pos_embed
        if table is None:
            self.table = self.offset = None
            return
        cells = table.detach()[0, 0 if model.vit.no_embed_class else model.num_prefix_tokens :].double()
        offset = cells.mean(0)
        inverse = torch.kron(kernels.inverse_y.double(), kernels.inverse_x.double())
        self.register_buffer("table", (inverse @ (cells - offset)).float())
        self.register_buffer("offset", offset.float())

    def forward(self, images: Tensor, positions: Tensor, patch_embed: Any, *_: Any) -> Tensor:
        """Images (B, C, H, W) of any dtype and positions (B, N, 2 or 3), or (1, N, ·) for all, → tokens (B, N, D)."""
        size = patch_embed.proj.kernel_size[0]
        if self.levels is None:
            pixels = flat_windows(images.permute(0, 2, 3, 1), positions, size)
        else:
            read = scaled_flat_windows if self.given else pyramid_windows
            pixels = read(images.permute(0, 2, 3, 1), positions, size, self.levels)
            positions = positions[..., :2]
        after = None if isinstance(patch_embed.norm, nn.Identity) else self.offset  # the norm would change it
        bias = self.bias if self.offset is None or after is not None else self.bias + self.offset
        tokens = F.linear(pixels.flatten(2).flatten(0, 1), self.weight, bias)
        tokens = patch_embed.norm(tokens).view(*pixels.shape[:2], -1)
        if self.table is None:
            return tokens
        distance = positions @ self.pick - self.centres
        y, x = torch.exp(-(distance * distance)).split((self.rows, self.columns), -1)
        tokens = tokens + (y[..., :, None] * x[..., None, :]).flatten(-2) @ self.table
        return tokens if after is None else tokens + after
