"""The module that is exported: images, and positions unless a placement is built in → logits and features.

It computes the same as the SpotViT, in a form that is fast in runtimes without PyTorch's fast paths:

- Pixels are gathered from the flattened batch (spot.export.flat).
- Tokens are (B · N, D) between attentions, so that a linear layer with its bias is one Gemm node.
- Attention is ONNX's Attention node, from opset 23 on, without the transpositions around it.
- The weights of the patch projection include mean and std. Interpolation is linear and its weights sum
  to one, so normalisation can follow it instead of preceding it.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spot.errors import InputError
from spot.export.flat import flat_windows, pyramid_windows, scaled_flat_windows
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.tome_schedule import is_standard
from spot.models.wrappers import PlainViT
from spot.placement.policy import Policy
from spot.tokens.positions import in_region
from spot.tokens.tokenizer import Tokenizer

ExportedModel = SpotViT | ToMe | PlainViT
Input = Literal["uint8", "float"]
Output = Literal["logits", "pooled", "tokens"]


class Graph(nn.Module):
    """A model in its exported form. forward(images, positions) → a tuple of `outputs`.

    Args:
        model: a SpotViT; or a PlainViT or ToMe, whose placement is always built in. It is not changed.
        image: "uint8" for RGB (B, H, W, 3) as decoders return it, "float" for normalised images (B, C, H, W).
        built_in: build the model's own placement in. The graph then takes images alone, of the model's own size.
        columns: of positions as an input: 2, 3 with a scale each, or 7 with a scale and a region each.
        outputs: some of logits (B, classes), pooled (B, D) and tokens (B, P + N, D).
        attention_node: write ONNX's Attention (for opset 23 and later) instead of PyTorch's.
    """

    positions: Tensor | None  # (1, N, 2 or 3) if they are built in and the same for every image

    def __init__(
        self,
        model: ExportedModel,
        *,
        image: Input = "uint8",
        built_in: bool = False,
        columns: int = 2,
        outputs: Sequence[Output] = ("logits",),
        attention_node: bool = False,
    ) -> None:
        super().__init__()
        merging = model if isinstance(model, ToMe) else None
        self.on_grid = isinstance(model, PlainViT) or (merging is not None and not merging.own_placement)
        self.built_in = built_in or not isinstance(model, SpotViT)
        model = model.spot_vit
        if type(model.tokenizer) is not Tokenizer:
            raise InputError(f"a model with a {type(model.tokenizer).__name__} cannot be exported; only SPoT's own")
        channels = model.vit.patch_embed.proj.in_channels
        if image == "uint8" and channels != 3:
            raise InputError(f"this model's images have {channels} channels; export it with a float input")
        self.image, self.outputs, self.attention_node = image, tuple(outputs), attention_node
        policy, positions, largest = None, None, max(model.img_size) / model.patch_size
        if self.on_grid:
            columns = 2
        elif self.built_in:
            prior = model.resolved_prior()
            if prior.random or (prior.uses_image and type(prior.draw) is not Policy):
                why = "draws at random" if prior.random else "looks at the image"
                raise InputError(
                    f"the prior {prior.name} {why} and cannot be built in; export with positions as an input"
                )
            placed = model.place(blank(model))
            policy, positions = (model.policy, None) if prior.uses_image else (None, placed)
            columns = placed.shape[-1]
            largest = float(placed[..., 2].max()) if columns > 2 else 1.0
        self.columns = columns
        self.register_buffer("positions", positions)
        # The number that spot.tokens.pyramid builds for windows up to this scale; larger images have no more.
        self.levels = 1 + max(0, math.ceil(math.log2(max(largest, 1)) - 1e-6)) if columns > 2 else 1
        read: Callable[[Tensor, Tensor], Tensor] = partial(flat_windows, size=model.patch_size)
        if columns > 2 and self.built_in:
            read = partial(pyramid_windows, size=model.patch_size, levels=self.levels, largest=min(largest, 2.0))
        elif columns > 2:
            read = partial(scaled_flat_windows, size=model.patch_size, levels=self.levels)
        self.model = copy.copy(model)  # shares all weights; only the tokenizer differs
        self.model._modules = {**model._modules, "policy": policy, "tokenizer": FlatTokenizer(model, image, read)}
        # If a graph holds a module twice, torch.export wraps all its modules, and type(block) is then no longer Block.
        self.standard = all(map(is_standard, model.vit.blocks))
        self.merging = None if merging is None else (merging,)  # in a tuple: its weights are the model's
        self.schedule = [0] * len(model.vit.blocks) if merging is None else merging.schedule()

    def forward(self, images: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.image == "uint8":
            images = images.permute(0, 3, 1, 2)
        return self.predict(*self.encode(*self.embed(images, positions)))

    def embed(self, images: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The first block's input (B, P + N, D) from images (B, C, H, W), and the rotary angles, if any."""
        if self.on_grid:
            vit: Any = self.model.vit
            tokenizer: Any = self.model.tokenizer
            kernel = tokenizer.weight.view_as(vit.patch_embed.proj.weight)  # normalises too
            x = F.conv2d(images.float(), kernel, tokenizer.bias, stride=self.model.patch_size)
            return vit.norm_pre(vit._pos_embed(vit.patch_embed.norm(x.flatten(2).transpose(1, 2)))), None
        if self.built_in:
            positions = self.place(images) if self.positions is None else self.positions
        assert positions is not None
        return self.model.embed(images, positions)

    def place(self, images: Tensor) -> Tensor:
        """The placement of the model's policy for bytes or normalised images (B, C, H, W)."""
        if self.image == "uint8":
            images = normalise_pixels(images.permute(0, 2, 3, 1), self.model.data_config)
        return self.model.place(images)

    def predict(self, x: Tensor, counts: Tensor | None = None) -> tuple[Tensor, ...]:
        """The outputs from features (B, P + N, D) and the number of input tokens each represents (B, N)."""
        head: Any = self.model.forward_head
        if self.merging is not None:
            head = partial(self.merging[0].forward_head, sizes=counts)
        results: dict[str, Tensor] = {"tokens": x}
        if "pooled" in self.outputs:
            results["pooled"] = head(x, pre_logits=True)
        if "logits" in self.outputs:
            results["logits"] = head(x)
        return tuple(results[name] for name in self.outputs)

    def encode(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """SpotViT.encode, on a flat list of tokens if the blocks are timm's standard ones; also returns counts."""
        if rope is not None or not self.standard:
            return self.model.encode(x, rope), None
        batch, tokens, width = x.shape
        prefix, mask = self.model.num_prefix_tokens, None
        counts = x.new_ones(1, tokens - prefix) if self.merging is not None else None
        x = x.reshape(-1, width)
        for block, merged in zip(self.model.vit.blocks, self.schedule, strict=True):
            y, keys = self.attend(block.attn, block.norm1(x), batch, tokens, mask)
            x = x + block.ls1(y)
            if merged and counts is not None:
                keys = keys.unflatten(-1, (block.attn.num_heads, -1)).mean(2)
                x, counts = merge(x.view(batch, tokens, width), keys, counts, merged, prefix)
                tokens -= merged
                x, mask = x.reshape(-1, width), F.pad(counts.log(), (prefix, 0))[:, None, None]
            x = x + block.ls2(block.mlp(block.norm2(x)))
        return self.model.vit.norm(x).view(batch, tokens, width), counts

    def attend(
        self, attention: Any, x: Tensor, batch: int, tokens: int, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A timm Attention on (B · N, D), with a mask (B, 1, 1, N) added to its logits; also returns keys (B, N, D)."""
        qkv = attention.qkv(x).view(batch, tokens, 3 * attention.attn_dim)
        heads = attention.num_heads
        if self.attention_node and isinstance(attention.q_norm, nn.Identity):
            q, k, v = qkv.split(attention.attn_dim, -1)
            wide = None if mask is None else mask.expand(-1, -1, tokens, -1)
            y = torch.onnx.ops.attention(q, k, v, wide, q_num_heads=heads, kv_num_heads=heads)[0]
        else:
            q, k, v = qkv.view(batch, tokens, 3, heads, attention.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            k = attention.k_norm(k)
            y = F.scaled_dot_product_attention(attention.q_norm(q), k, v, attn_mask=mask).transpose(1, 2)
            k = k.transpose(1, 2).flatten(2)
        return attention.proj(attention.norm(y.reshape(-1, attention.attn_dim))), k


def merge(x: Tensor, keys: Tensor, counts: Tensor, merged: int, prefix: int) -> tuple[Tensor, Tensor]:
    """The merge of a ToMe block (spot.models.tome.match), with comparisons and products instead of sorting.

    x (B, P + N, D), keys (B, P + N, head_dim), counts (B, N) → x (B, P + N - merged, D), counts (B, N - merged).
    """
    keys = F.normalize(keys[:, prefix:], dim=-1)
    first, second = keys[:, ::2], keys[:, 1::2]
    similarity, partner = (first @ second.mT).max(-1)
    mine, other = similarity[..., None], similarity[:, None]
    earlier = torch.ones(first.shape[1], first.shape[1], device=x.device).tril(-1)
    ahead = (other > mine).float() + (other == mine).float() * earlier  # (B, A, A): tokens that merge before each
    leaves = ahead.sum(-1) < merged
    stay = first.shape[1] - merged
    # The number of kept tokens before each, counted by a product.
    place = (~leaves).float() @ earlier.mT
    goes = torch.where(leaves, (partner + stay).float(), place)  # (B, A)
    left = torch.arange(keys.shape[1] - merged, device=x.device)[:, None]
    weights = (goes[:, None] == left).float() * counts[:, None, ::2]  # (B, M, A)
    kept = counts[:, 1::2]
    total = weights.sum(-1) + F.pad(kept, (stay, 0))
    summed = weights @ x[:, prefix::2] + F.pad(x[:, prefix + 1 :: 2] * kept[..., None], (0, 0, stay, 0))
    return torch.cat([x[:, :prefix], summed / total[..., None]], 1), total


def blank(model: SpotViT) -> Tensor:
    """An image (1, C, H, W) of the model's own size."""
    return torch.zeros(1, model.data_config["input_size"][0], *model.img_size)


def normalise_pixels(pixels: Tensor, config: dict[str, Any]) -> Tensor:
    """RGB bytes (B, H, W, 3) → the input (B, 3, H, W) of a model with this mean and std."""
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std


class FlatTokenizer(nn.Module):
    """A Tokenizer with few nodes: gathers pixels from the flattened batch, and normalises them in its weights.

    Bytes are divided by 255, then mean and std apply. weight is (D, C · K · K). The position embedding is the product
    of the kernels at a position and `table`, which includes the kernels' inverse, plus `offset`, the value far outside
    the grid.
    """

    weight: Tensor
    bias: Tensor
    pick: Tensor
    centres: Tensor
    table: Tensor | None
    offset: Tensor | None

    def __init__(self, model: SpotViT, image: Input, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        """read: reads windows of images (B, H, W, C) at positions, see spot.export.flat."""
        super().__init__()
        self.read = read
        proj: Any = model.vit.patch_embed.proj
        mean, std, unit = (0.0,) * proj.in_channels, (1.0,) * proj.in_channels, 1.0
        if image == "uint8":
            mean, std, unit = model.data_config["mean"], model.data_config["std"], 255.0
        weight = proj.weight.detach().double()
        middle, width = (torch.tensor(each).to(weight)[:, None, None] for each in (mean, std))
        bias = -(weight * (middle / width)).sum((1, 2, 3))
        if proj.bias is not None:
            bias = bias + proj.bias.detach()
        self.register_buffer("weight", (weight / (width * unit)).flatten(1).float())
        self.register_buffer("bias", bias.float())
        kernels: Any = model.tokenizer.kernels
        self.rows, self.columns = kernels.grid_size
        # One product computes y for all rows' kernels and x for all columns', in units in which a kernel is exp(-d²).
        units = [cells / kernels.sigma * 0.5**0.5 for cells in kernels.grid_size]
        pick = torch.zeros(2, self.rows + self.columns)
        pick[0, : self.rows], pick[1, self.rows :] = units
        self.register_buffer("pick", pick)
        self.register_buffer("centres", kernels.centres * pick.sum(0))
        table = model.vit.pos_embed
        if table is None:
            self.table = self.offset = None
            return
        cells = table.detach()[0, 0 if model.vit.no_embed_class else model.num_prefix_tokens :].double()
        offset = cells.mean(0)
        inverse = torch.kron(
            kernels.inverse[: self.rows, : self.rows].double(), kernels.inverse[self.rows :, self.rows :].double()
        )
        self.register_buffer("table", (inverse @ (cells - offset)).float())
        self.register_buffer("offset", offset.float())

    def kernels(self, positions: Tensor) -> Tensor:
        """Kernels of all cells at positions (B, N, 2, 3 or 7): (B, N, rows · columns)."""
        distance = in_region(positions) @ self.pick - self.centres
        y, x = torch.exp(-(distance * distance)).split((self.rows, self.columns), -1)
        return (y[..., :, None] * x[..., None, :]).flatten(-2)

    def forward(self, images: Tensor, positions: Tensor, patch_embed: Any, *_: Any) -> Tensor:
        """Images (B, C, H, W) of any dtype and positions (B, N, 2, 3 or 7), or (1, N, ·) → tokens (B, N, D)."""
        pixels = self.read(images.permute(0, 2, 3, 1), positions)
        after = None if isinstance(patch_embed.norm, nn.Identity) else self.offset  # a norm would change it
        bias = self.bias if self.offset is None or after is not None else self.bias + self.offset
        tokens = F.linear(pixels.flatten(2).flatten(0, 1), self.weight, bias)
        tokens = patch_embed.norm(tokens).view(*pixels.shape[:2], -1)
        if self.table is None:
            return tokens
        tokens = tokens + self.kernels(positions) @ self.table
        return tokens if after is None else tokens + after
