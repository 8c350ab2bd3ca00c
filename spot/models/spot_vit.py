"""SpotViT: a timm ViT with tokens anywhere in an image.

It holds a timm model and calls its parts. Only the patch grid is replaced, by windows at continuous
positions; with `positions = model.grid(images)` it equals the timm model. All weights stay in
`model.vit` under timm's names, so a model that was trained off the grid is still a timm checkpoint.

    model = spot.adapt("vit_small_patch16_224", tokens=49, prior="center", pretrained=True)
    logits = model(images)                  # tokens placed by the model's own prior
    logits = model(images, tokens=25)       # another budget for this call; `prior` works likewise
    logits = model(images, positions)       # tokens placed by the caller, (B, N, 2), (y, x) fractions
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from timm.models._manipulate import checkpoint
from torch import Generator, Tensor, nn

from spot.data.picture import Fit
from spot.errors import InputError, check_kind
from spot.models.dense import to_map
from spot.models.timm_vit import AnswersAsTimm, TimmViT, block_indices, create_timm, refuse_unfit
from spot.placement.priors import LEARNED, PRIORS, AnyPrior, Prior, check_images, check_tokens, resolve_prior
from spot.placement.saliency import Source, resolve_saliency
from spot.placement.sizes import Scale, check_scale, resolve_scale, sized
from spot.tokens.authors import AuthorsTokenizer
from spot.tokens.position_embedding import grid_positions, rotary_embedding
from spot.tokens.positions import check_positions
from spot.tokens.pyramid import can_read
from spot.tokens.tokenizer import Tokenizer


class Features(NamedTuple):
    """Features of an image's tokens with their positions."""

    tokens: Tensor  # (B, N, D)
    prefix: Tensor  # (B, P, D): class, distillation and register tokens
    positions: Tensor  # (B, N, 2), (y, x) fractions


def adapt(
    model: str | nn.Module,
    *,
    tokens: int | None = None,
    prior: AnyPrior = "isotropic",
    pretrained: bool = False,
    **kwargs: Any,
) -> "SpotViT":
    """Adapt a timm ViT to tokens at continuous positions. On its own grid its output does not change.

    Args:
        model: a timm model, or a timm name (then `pretrained` and kwargs go to timm.create_model).
            A model is held, not copied.
        tokens: number of tokens to place; by default the grid's.
        prior: how to place them: a name in spot.PRIORS or a function (images, tokens, generator).
    """
    if isinstance(model, nn.Module):
        if kwargs or pretrained:
            raise InputError("pretrained and timm options go with a model's name, not with a built model")
        return SpotViT(model, tokens=tokens, prior=prior)
    check_kind("model", model, str, nn.Module)
    return SpotViT(create_timm(model, pretrained=pretrained, **kwargs), tokens=tokens, prior=prior, options=kwargs)


class SpotViT(AnswersAsTimm, nn.Module, PyTorchModelHubMixin):
    """A timm ViT with a token placement. Build one with spot.adapt or spot.load."""

    tokens: int  # number of tokens in the model's own placement
    prior: AnyPrior  # places tokens if the caller gives no positions. A policy becomes `policy`, and this "learned"
    scale: Scale | None  # size of the windows: the distance between samples in pixels, or "auto"; None is 1
    saliency: Source  # source of the maps for priors that need them; see `saliency_maps`
    policy: nn.Module | None  # the learned prior, an ordinary submodule; selected by the name "learned"
    weights_hash: str | None = None  # names the weights in files that are for them; None: the hash of the ViT's tensors

    def __init__(
        self,
        vit: TimmViT,
        *,
        tokens: int | None = None,
        prior: AnyPrior = "isotropic",
        scale: Scale | None = None,
        saliency: Source = "spectral",
        sigma: float = 0.8,
        options: dict[str, Any] | None = None,
        tokenizer: nn.Module | None = None,
    ) -> None:
        """
        Args:
            scale: the size of the windows that the model places, or "auto"; see `place`.
            saliency: the source of maps for priors that need them; see `saliency_maps`.
            sigma: width of the position kernels in grid cells.
            options: timm.create_model's options with which `vit` can be rebuilt from its name.
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
        self.register_module("policy", None)
        self.prior = prior
        self.scale = scale
        self.saliency = saliency
        self.tokens = len(self.grid()) if tokens is None else tokens

    # Properties of the model

    @property
    def spot_vit(self) -> "SpotViT":
        """The SpotViT whose weights are used: this one. See spot.models.wrappers."""
        return self

    @property
    def patch_size(self) -> int:
        """K: the side of a window in pixels."""
        return self.vit.patch_embed.patch_size[0]

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of the ViT's own patch grid."""
        return tuple(self.vit.patch_embed.grid_size)

    @property
    def name(self) -> str:
        """timm's name for the ViT, with its pretrained tag if it has one."""
        config = getattr(self.vit, "pretrained_cfg", None) or {}
        architecture, tag = config.get("architecture", type(self.vit).__name__), config.get("tag")
        return f"{architecture}.{tag}" if tag else architecture

    @property
    def fit(self) -> Fit:
        """How a photograph is fitted to the input, "full" with a finder; see spot.data.picture.evaluation_transform."""
        return self.policy.fit if self.policy is not None and self.prior == LEARNED else "crop"  # type: ignore[return-value]

    # Placement

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse an invalid setting of the placement when it is assigned."""
        if name == "tokens":
            check_tokens(value)
        elif name == "prior":
            resolve_prior(value)
            if isinstance(value, nn.Module):
                self.policy, value = value, LEARNED
        elif name == "scale":
            check_scale(value)
            if value not in (None, 1) and isinstance(self.tokenizer, AuthorsTokenizer):
                raise InputError(f"the authors' checkpoints read windows of one size, got scale {value}; leave it out")
        elif name == "saliency":
            if not isinstance(value, (str, Path, Tensor)) and not callable(value):
                raise InputError(f"saliency must be a name, file, folder, function or maps, got {type(value).__name__}")
            return object.__setattr__(self, name, value)  # so that a network does not become a submodule
        super().__setattr__(name, value)

    def at(self, *, tokens: int | None = None, prior: AnyPrior | None = None, scale: Scale | None = None) -> "SpotViT":
        """The same model with another default budget, prior or scale. All submodules are shared, not copied."""
        other = copy.copy(self)
        other._modules = dict(self._modules)  # so that setting a policy on one does not affect the other
        for name, value in {"tokens": tokens, "prior": prior, "scale": scale}.items():
            if value is not None:
                setattr(other, name, value)
        return other

    @property
    def random(self) -> bool:
        """Whether the placement depends on the seed."""
        return resolve_prior(self.prior).random

    def grid(self, images: Tensor | None = None) -> Tensor:
        """The ViT's own positions: (rows × columns, 2), or for images (B, C, H, W) of any size (B, N, 2)."""
        device = next(self.vit.parameters()).device
        if images is None:
            return grid_positions(self.grid_size).to(device)
        check_images(images)
        rows, columns = (length // self.patch_size for length in images.shape[-2:])
        return grid_positions((rows, columns)).to(device).expand(images.shape[0], -1, -1)

    def place(
        self,
        images: Tensor,
        *,
        tokens: int | None = None,
        prior: AnyPrior | None = None,
        scale: Scale | None = None,
        generator: Generator | None = None,
        keys: Sequence[str] | None = None,
        seed: int = 0,
        maps: Tensor | None = None,
    ) -> Tensor:
        """Positions (B, N, 2) for images (B, C, H, W). All token placement goes through this method.

        With a scale other than 1 they are (B, N, 3): the third number is the window's scale.

        Args:
            tokens, prior, scale: by default the model's own. A scale is the distance between a window's samples
                in pixels; "auto" chooses larger windows for smaller budgets (spot/placement/sizes.py).
            generator: source of random positions for the whole batch.
            keys: names of the images; each image's positions then depend only on (seed, key), not on the batch.
            maps: saliency (B, H, W) for a prior that needs it; by default the model's own, `saliency_maps`.
        """
        check_images(images)
        chosen = self.resolved_prior(prior)
        if chosen.needs_map and maps is None:
            maps = self.saliency_maps(images, keys)
        count = self.tokens if tokens is None else tokens
        check_tokens(count)
        check_scale(scale)
        size = resolve_scale(self.scale if scale is None else scale, count, images, self.patch_size)
        cells = math.prod(self.grid_size)
        if PRIORS.get(chosen.name) is chosen and not (chosen.random or chosen.uses_image) and can_read(images):
            return even_positions(chosen, count, tuple(images.shape[-2:]), cells, size).repeat(len(images), 1, 1)
        positions = chosen(images, count, generator, keys=keys, seed=seed, maps=maps, cells=cells)
        return positions if positions.shape[-1] > 2 else sized(positions, size)

    def resolved_prior(self, prior: AnyPrior | None = None) -> Prior:
        """Resolve a prior's name or function, by default the model's own; "learned" is its policy."""
        chosen = resolve_prior(self.prior if prior is None else prior)
        if not chosen.learned:
            return chosen
        if self.policy is None:
            raise InputError(
                f"{self.name} has no learned prior; train one with spot learn, or load it with its policy's file, "
                'spot.load(name, prior="FILE.policy.safetensors")'
            )
        return resolve_prior(self.policy)

    def saliency_maps(self, images: Tensor, keys: Sequence[str] | None = None) -> Tensor:
        """Maps (B, H, W) in [0, 1] of images as the model takes them, from `model.saliency`.

        The source is "spectral", "clipseg", an .onnx file, a folder of maps by the images' keys, a
        function of RGB images (B, 3, H, W) in [0, 1], or a tensor of maps.
        """
        return resolve_saliency(self.saliency, self)(images, keys)

    def positions_for(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        """The given positions, or those of `place`, after a check of images and positions."""
        proj = self.vit.patch_embed.proj
        check_images(images)
        if images.dtype != proj.weight.dtype and not torch.is_autocast_enabled(images.device.type):
            needed = proj.weight.dtype
            raise InputError(f"the model has {needed} weights, so images must have that type too, got {images.dtype}")
        if images.shape[1] != proj.in_channels:
            raise InputError(f"images must have shape (B, {proj.in_channels}, H, W), got {tuple(images.shape)}")
        placement = {name: value for name, value in placement.items() if value is not None}
        if positions is None:
            return self.place(images, **placement)
        if placement:
            raise InputError(f"positions are given, so {' and '.join(placement)} would change nothing; leave them out")
        check_positions(positions)
        return positions

    # From images to predictions

    def forward(  # no keyword-only arguments: torch.onnx's old exporter passes all by position
        self,
        images: Tensor,
        positions: Tensor | None = None,
        tokens: int | None = None,
        prior: AnyPrior | None = None,
        scale: Scale | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Images (B, C, H, W) and positions (B, N, 2 or 3), by default from `place` → logits (B, classes)."""
        placement = {"tokens": tokens, "prior": prior, "scale": scale, "generator": generator}
        return self.forward_head(self.forward_features(images, positions, **placement))

    def forward_features(self, images: Tensor, positions: Tensor | None = None, **placement: Any) -> Tensor:
        """The normalised output of the last block: prefix tokens, then placed tokens, (B, P + N, D)."""
        return self.encode(*self.embed(images, self.positions_for(images, positions, **placement)))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (B, P + N, D) → logits, or with pre_logits the pooled features (B, D)."""
        return self.vit.forward_head(features, pre_logits=pre_logits)

    def token_features(
        self,
        images: Tensor,
        positions: Tensor | None = None,
        *,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        **placement: Any,
    ) -> list[Features]:
        """Token features and positions after some blocks. `forward_intermediates` returns features in timm's formats.

        Args:
            indices: the last n blocks if an int, these blocks if a sequence, all if None.
            norm: apply the ViT's final norm to each.
            placement: tokens, prior, scale and generator, as in forward.
        """
        positions = self.positions_for(images, positions, **placement)
        wanted, prefix = block_indices(self.vit, indices), self.num_prefix_tokens
        x, rope = self.embed(images, positions)
        taken = []
        for index, block in enumerate(self._blocks(rope)):
            x = block(x)
            if index in wanted:
                y = self.vit.norm(x) if norm else x
                taken.append(Features(y[:, prefix:], y[:, :prefix], positions))
            if index == wanted[-1]:
                break
        return taken

    def features_at(self, images: Tensor, points: Tensor, positions: Tensor | None = None) -> Tensor:
        """Normalised features of the last block (B, M, D) of tokens at points (B, M, 2).

        A token at each point attends to the image's tokens (`positions`, by default the ViT's own grid). These do
        not attend to it, and points do not attend to each other. A point's feature thus depends on no other
        point, and at the position of one of the image's tokens it equals that token's feature.
        """
        context = self.grid(images) if positions is None else positions
        if points.ndim != 3 or points.shape[-1] != context.shape[-1] or len(points) != len(images):
            wanted = (len(images), "M", context.shape[-1])
            raise InputError(f"points must have shape {wanted} like positions, got {tuple(points.shape)}")
        x, rope = self.embed(images, torch.cat([context, points.to(context)], 1))
        first_point = self.num_prefix_tokens + context.shape[1]
        mask = torch.arange(x.shape[1], device=x.device) < first_point
        return self.encode(x, rope, mask=mask.expand(len(x), 1, x.shape[1], -1))[:, first_point:]

    def to_map(self, features: Features, size: tuple[int, int] | None = None) -> Tensor:
        """Scattered tokens → a map (B, D, height, width), by default of the grid's size; see spot.models.dense."""
        check_kind("features", features, Features, advice="model.token_features(images) gives a list of them")
        return to_map(features.tokens, features.positions, self.grid_size if size is None else size)

    def embed(self, images: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """The first block's input: prefix and placed tokens (B, P + N, D), and the rotary angles, if any."""
        vit, table = self.vit, self.vit.pos_embed
        prefix = self._prefix_tokens()
        if table is not None and not vit.no_embed_class:
            prefix = prefix + table[:, : self.num_prefix_tokens]
            table = table[:, self.num_prefix_tokens :]
        x = self.tokenizer(images, positions, vit.patch_embed, None if table is None else table[0])
        x = torch.cat([prefix.expand(x.shape[0], -1, -1).to(x.dtype), x], 1)
        x = vit.norm_pre(vit.pos_drop(x))
        rope = getattr(vit, "rope", None)
        if rope is None:
            return x, None
        cells = [length / self.patch_size for length in images.shape[-2:]]
        return x, rotary_embedding(rope, positions, cells)

    def encode(self, x: Tensor, rope: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Embedded tokens (B, P + N, D) through all blocks and the final norm; mask: the keys a query attends to."""
        for block in self._blocks(rope, mask):
            x = block(x)
        return self.vit.norm(x)

    def _blocks(self, rope: Tensor | None, mask: Tensor | None = None) -> Iterator[Callable[[Tensor], Tensor]]:
        """The blocks as functions of tokens, with gradient checkpointing if it is enabled."""
        for index, block in enumerate(self.vit.blocks):
            options = {} if rope is None else {"rope": rope[index] if self.vit.rope_mixed else rope}
            options |= {} if mask is None else {"attn_mask": mask}
            run = partial(checkpoint, block) if self.vit.grad_checkpointing else block
            yield partial(run, **options)

    def _prefix_tokens(self) -> Tensor:
        """Class, then distillation or register tokens, as timm orders them: (1, P, D)."""
        tokens = [getattr(self.vit, name, None) for name in ("cls_token", "dist_token", "reg_token")]
        present = [token for token in tokens if token is not None]
        return torch.cat(present, 1) if present else next(self.vit.parameters()).new_zeros(1, 0, self.embed_dim)

    # Saving and loading by PyTorchModelHubMixin; formats are in checkpoints.py and card.py, which know this class

    def generate_model_card(self, *_: Any, **__: Any) -> ModelCard:
        """The README.md that save_pretrained and push_to_hub write."""
        from spot.models.card import model_card

        return model_card(self)

    def _save_pretrained(self, save_directory: Path) -> None:
        from spot.models.checkpoints import save_folder

        save_folder(self, save_directory)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> "SpotViT":  # type: ignore[override]
        from spot.models.checkpoints import load_pretrained

        return load_pretrained(model_id, **options)


@lru_cache(maxsize=64)
def even_positions(prior: Prior, tokens: int, shape: tuple[int, int], cells: int, scale: float) -> Tensor:
    """The placement (1, N, 2 or 3) of a prior that depends only on the size of the images."""
    return sized(prior(torch.empty(1, 1, *shape, device="cpu"), tokens, cells=cells), scale)
