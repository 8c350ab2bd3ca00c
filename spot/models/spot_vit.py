"""SpotViT: a timm ViT that reads tokens anywhere in an image.

It holds a timm model and calls its parts: only the patch grid is replaced, by windows at
continuous positions. With `positions = model.grid()` it is the timm model. All weights stay in
`model.vit` under timm's names, so what is trained off the grid is still a timm checkpoint.

    model = spot.adapt("vit_small_patch16_224", tokens=49, prior="center", pretrained=True)
    logits = model(images)                  # tokens placed by the model's own prior
    logits = model(images, positions)       # tokens placed by the caller, (B, N, 2), (y, x) fractions
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from huggingface_hub import PyTorchModelHubMixin
from timm.data import resolve_model_data_config
from timm.layers import PatchEmbed
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor, nn

from spot.errors import InputError, unknown
from spot.placement.priors import PRIORS, Prior, center, check_tokens, resolve_prior
from spot.tokens.position_embedding import ROTARY, grid_positions, rotary_embedding
from spot.tokens.tokenizer import Tokenizer

TimmViT = Any  # a timm VisionTransformer or Eva; timm's modules are not typed


class Features(NamedTuple):
    """What the blocks say of an image: one vector per token, and where each token stood."""

    tokens: Tensor  # (B, N, D)
    prefix: Tensor  # (B, P, D): class, distillation and register tokens
    positions: Tensor  # (B, N, 2), (y, x) fractions


def adapt(
    model: str | nn.Module,
    *,
    tokens: int | None = None,
    prior: str | Prior = "isotropic",
    pretrained: bool = False,
    **kwargs: Any,
) -> "SpotViT":
    """Let a timm ViT read tokens at continuous positions, exactly as before on its grid.

    Args:
        model: a timm model, or a timm name (then `pretrained` and kwargs go to timm.create_model).
            A model is held, not copied.
        tokens: how many tokens to place; by default as many as the grid has.
        prior: where to place them: a name in spot.PRIORS or a function of that signature.
    """
    if isinstance(model, nn.Module):
        if kwargs or pretrained:
            raise InputError("pretrained and timm options go with a model's name, not with a built model")
        return SpotViT(model, tokens=tokens, prior=prior)
    return SpotViT(create_timm(model, pretrained=pretrained, **kwargs), tokens=tokens, prior=prior, options=kwargs)


def create_timm(name: str, *, pretrained: bool = False, **kwargs: Any) -> TimmViT:
    """timm.create_model, with a sentence where the name or an option is not timm's."""
    architecture = name.split("/")[-1].split(".")[0] if ":" not in name else ""
    if architecture and not timm.is_model(architecture):
        raise unknown("timm model", name, timm.list_models())
    try:
        vit = timm.create_model(name, pretrained=pretrained, **kwargs)
    except (TypeError, RuntimeError, ValueError) as error:
        raise InputError(f"timm cannot build {name!r} with {kwargs or 'no options'}: {error}") from error
    if not pretrained and architecture == name:  # timm fills in its default tag, whose weights these are not
        vit.pretrained_cfg = {**vit.pretrained_cfg, "tag": ""}
    return vit


class SpotViT(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="spot-vit",
    license="apache-2.0",
    pipeline_tag="image-classification",
    tags=["vision-transformer", "token-placement", "timm"],
):
    """A timm ViT and where its tokens go. Build one with spot.adapt or spot.load."""

    def __init__(
        self,
        vit: TimmViT,
        *,
        tokens: int | None = None,
        prior: str | Prior = "isotropic",
        sigma: float = 0.8,
        options: dict[str, Any] | None = None,
        tokenizer: nn.Module | None = None,
    ) -> None:
        """
        Args:
            sigma: width of the position kernels in grid cells.
            options: what timm.create_model needs beside the architecture's name to build `vit` again.
            tokenizer: replaces the standard one (the authors' checkpoints need their own).
        """
        super().__init__()
        if tokenizer is None:
            refuse_unfit(vit)
            tokenizer = Tokenizer(vit.patch_embed.grid_size, sigma)
        self.vit = vit
        self.tokenizer = tokenizer
        self.sigma = sigma
        self.options = dict(options or {})
        self.prior = prior
        self.tokens = len(self.grid()) if tokens is None else tokens

    # What the model is

    @property
    def patch_size(self) -> int:
        """K: the side of a window in pixels."""
        return self.vit.patch_embed.patch_size[0]

    @property
    def img_size(self) -> tuple[int, int]:
        """(H, W) of the images the ViT was built for. Others work: positions are fractions."""
        return tuple(self.vit.patch_embed.img_size)

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of the ViT's own patch grid."""
        return tuple(self.vit.patch_embed.grid_size)

    @property
    def embed_dim(self) -> int:
        return self.vit.embed_dim

    @property
    def num_classes(self) -> int:
        return self.vit.num_classes

    @property
    def num_prefix_tokens(self) -> int:
        return self.vit.num_prefix_tokens

    @property
    def name(self) -> str:
        """timm's name for the ViT, with its pretrained tag where it has one."""
        config = getattr(self.vit, "pretrained_cfg", None) or {}
        architecture, tag = config.get("architecture", type(self.vit).__name__), config.get("tag")
        return f"{architecture}.{tag}" if tag else architecture

    @property
    def data_config(self) -> dict[str, Any]:
        """How the ViT wants its images: timm's mean, std, interpolation, crop_pct and input_size."""
        config = resolve_model_data_config(self.vit)
        return {**config, "input_size": (config["input_size"][0], *self.img_size)}

    # Where its tokens go

    @property
    def tokens(self) -> int:
        """How many tokens the model's own placement has."""
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        check_tokens(tokens)
        self._tokens = tokens

    @property
    def prior(self) -> str | Prior:
        """Where the model places tokens that the caller has not placed."""
        return self._prior

    @prior.setter
    def prior(self, prior: str | Prior) -> None:
        if isinstance(prior, str) and prior not in PRIORS:
            resolve_prior(prior)  # raises, saying what is missing
        self._prior = prior

    def grid(self, images: Tensor | None = None) -> Tensor:
        """The ViT's own positions, (rows × columns, 2), for its img_size or for other images (B, C, H, W)."""
        if images is None:
            rows, columns = self.grid_size
        else:
            rows, columns = (length // self.patch_size for length in images.shape[-2:])
        return grid_positions((rows, columns)).to(next(self.vit.parameters()).device)

    def place(
        self,
        images: Tensor,
        generator: Generator | None = None,
        tokens: int | None = None,
        *,
        prior: str | Prior | None = None,
    ) -> Tensor:
        """Positions (B, N, 2) by the model's prior and budget, or by others."""
        prior = resolve_prior(self.prior if prior is None else prior)
        if prior is center:
            prior = partial(center, full=len(self.grid()))
        return prior(images, self.tokens if tokens is None else tokens, generator)

    # From images to predictions

    def forward(self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None) -> Tensor:
        """Images (B, C, H, W), and positions (B, N, 2) or the model's own → logits (B, classes)."""
        return self.forward_head(self.forward_features(images, positions, generator))

    def forward_features(
        self, images: Tensor, positions: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """The normalised outcome of the last block: prefix tokens, then placed tokens, (B, P + N, D)."""
        return self.encode(*self.embed(images, self._placed(images, positions, generator)))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (B, P + N, D) → logits, or with pre_logits the pooled features (B, D)."""
        return self.vit.forward_head(features, pre_logits=pre_logits)

    def forward_intermediates(
        self,
        images: Tensor,
        positions: Tensor | None = None,
        generator: Generator | None = None,
        *,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
    ) -> list[Features]:
        """Token features with their positions after some blocks.

        Args:
            indices: the last n blocks if an int, these blocks if a sequence, all if None.
            norm: apply the ViT's final norm to each.
        """
        positions = self._placed(images, positions, generator)
        x, rope = self.embed(images, positions)
        try:
            wanted, _ = feature_take_indices(len(self.vit.blocks), indices)
        except AssertionError as error:
            raise InputError(f"this ViT has {len(self.vit.blocks)} blocks, got indices {indices}") from error
        taken, prefix = [], self.num_prefix_tokens
        for index, (block, options) in enumerate(self._blocks(rope)):
            x = block(x, **options)
            if index in wanted:
                y = self.vit.norm(x) if norm else x
                taken.append(Features(y[:, prefix:], y[:, :prefix], positions))
        return taken

    def embed(
        self, images: Tensor, positions: Tensor, scale: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What enters the first block: prefix and placed tokens (B, P + N, D), and rotary angles where used.

        scale: see spot.windows; how many pixels apart a window's samples stand.
        """
        vit, table = self.vit, self.vit.pos_embed
        prefix = self._prefix_tokens()
        if table is not None and not vit.no_embed_class:
            prefix = prefix + table[:, : self.num_prefix_tokens]
            table = table[:, self.num_prefix_tokens :]
        x = self.tokenizer(images, positions, vit.patch_embed, None if table is None else table[0], scale)
        x = torch.cat([prefix.expand(x.shape[0], -1, -1).to(x.dtype), x], 1)
        x = vit.norm_pre(vit.pos_drop(x))
        rope = getattr(vit, "rope", None)
        if rope is None:
            return x, None
        cells = [length / self.patch_size for length in images.shape[-2:]]
        return x, rotary_embedding(rope, positions, cells)

    def encode(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Embedded tokens (B, P + N, D) through all blocks and the final norm."""
        for block, options in self._blocks(rope):
            x = checkpoint(block, x, **options) if self.vit.grad_checkpointing else block(x, **options)
        return self.vit.norm(x)

    def _blocks(self, rope: Tensor | None) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """The blocks, each with what it takes beside the tokens."""
        for index, block in enumerate(self.vit.blocks):
            if rope is None:
                yield block, {}
            else:
                yield block, {"rope": rope[index] if self.vit.rope_mixed else rope}

    def _prefix_tokens(self) -> Tensor:
        """Class, then distillation or register tokens, as timm orders them: (1, P, D)."""
        names = ("cls_token", "dist_token") if hasattr(self.vit, "dist_token") else ("cls_token", "reg_token")
        tokens = [getattr(self.vit, name, None) for name in names]
        found = [token for token in tokens if token is not None]
        return torch.cat(found, 1) if found else next(self.vit.parameters()).new_zeros(1, 0, self.embed_dim)

    def _placed(self, images: Tensor, positions: Tensor | None, generator: Generator | None) -> Tensor:
        if images.ndim != 4 or images.shape[1] != self.vit.patch_embed.proj.in_channels:
            channels = self.vit.patch_embed.proj.in_channels
            raise InputError(f"images must have shape (B, {channels}, H, W), got {tuple(images.shape)}")
        if positions is None:
            return self.place(images, generator)
        if not torch.compiler.is_compiling() and not _finite(positions):
            raise InputError("positions must be finite, got NaN or infinity; fractions of height and width are needed")
        return positions

    # To and from disk: the format is checkpoints.py's business

    def _save_pretrained(self, save_directory: Path) -> None:
        from spot.models.checkpoints import save_folder

        save_folder(self, save_directory)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> "SpotViT":  # type: ignore[override]
        from spot.models.checkpoints import load_pretrained

        return load_pretrained(model_id, **options)


def _finite(positions: Tensor) -> bool:
    try:
        return bool(positions.isfinite().all())
    except RuntimeError:  # inside vmap there is no value to look at
        return True


def refuse_unfit(vit: TimmViT) -> None:
    """Refuse a model whose tokens cannot be placed freely, naming the reason."""
    stem, blocks = getattr(vit, "patch_embed", None), getattr(vit, "blocks", None) or []
    attention = [getattr(block, "attn", None) for block in blocks]
    if getattr(vit, "rel_pos_bias", None) is not None or any(_has(part, *RELATIVE) for part in attention):
        reason = "its relative position bias is a table of grid offsets, which off-grid tokens do not have"
    elif any(getattr(block, "window_size", 0) for block in blocks) or "Swin" in type(vit).__name__:
        reason = "its attention runs in windows of the grid, which off-grid tokens do not form"
    elif not isinstance(vit, (VisionTransformer, Eva)):
        reason = "it is neither a timm VisionTransformer nor an Eva, whose blocks take any set of tokens"
    elif not isinstance(stem, PatchEmbed) or type(stem.proj) is not nn.Conv2d:
        reason = f"its convolutional stem ({type(stem).__name__}) looks beyond the window of a token"
    elif stem.patch_size[0] != stem.patch_size[1]:
        reason = f"its patches are not square ({stem.patch_size})"
    elif stem.grid_size is None:
        reason = "it was built without an image size; pass img_size"
    elif type(getattr(vit, "rope", None)).__name__ not in (*ROTARY, "NoneType"):
        reason = f"its rotary embedding ({type(vit.rope).__name__}) has no continuous form here"
    elif not isinstance(getattr(vit, "patch_drop", None), (nn.Identity, type(None))):
        reason = "it drops patches at random while training; build it with patch_drop_rate=0"
    else:
        return
    raise InputError(f"{type(vit).__name__} cannot read off-grid tokens: {reason}")


RELATIVE = ("rel_pos", "relative_position_bias_table", "rel_pos_h")  # timm's names for it


def _has(part: nn.Module | None, *names: str) -> bool:
    return any(getattr(part, name, None) is not None for name in names)
