"""timm's ViTs: built by name, with timm's model interface, refused if their tokens cannot be placed freely."""

from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.layers import PatchEmbed
from timm.models._features import feature_take_indices
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from spot.data.classes import class_names
from spot.data.picture import evaluation_transform
from spot.errors import InputError, unknown
from spot.tokens.position_embedding import ROTARY

TimmViT = Any  # a timm VisionTransformer or Eva; timm's modules are not typed


def _of_vit(name: str) -> Any:
    """A property that returns the ViT's attribute of this name."""
    return property(lambda model: getattr(model.vit, name))


class AnswersAsTimm:
    """timm's model interface, delegated to the ViT in `vit`.

    Parameters have the prefix `vit.` here, so it is also added to parameter names and patterns.
    """

    vit: TimmViT

    embed_dim: int = _of_vit("embed_dim")
    num_features: int = _of_vit("num_features")
    head_hidden_size: int = _of_vit("head_hidden_size")
    num_classes: int = _of_vit("num_classes")
    num_prefix_tokens: int = _of_vit("num_prefix_tokens")
    get_classifier: Callable[[], nn.Module] = _of_vit("get_classifier")
    set_grad_checkpointing: Callable[..., None] = _of_vit("set_grad_checkpointing")
    prune_intermediate_layers: Callable[..., list[int]] = _of_vit("prune_intermediate_layers")

    @property
    def img_size(self) -> tuple[int, int]:
        """(H, W) of the images the ViT was built for. Other sizes work too, because positions are fractions."""
        return tuple(self.vit.patch_embed.img_size)

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """timm's description of the weights, with the ViT's own image size and number of classes."""
        config = dict(getattr(self.vit, "pretrained_cfg", None) or {})
        config |= {key: _named(config[key]) for key in ("classifier", "first_conv") if config.get(key)}
        channels = self.vit.patch_embed.proj.in_channels
        return {**config, "input_size": (channels, *self.img_size), "num_classes": self.num_classes}

    default_cfg = pretrained_cfg

    @property
    def data_config(self) -> dict[str, Any]:
        """The ViT's preprocessing: timm's mean, std, interpolation, crop_pct and input_size."""
        return resolve_data_config(pretrained_cfg=self.pretrained_cfg)

    def transform(self, training: bool = False) -> Any:
        """From a PIL image to the model's input: the paper's evaluation transform, or timm's for training."""
        if training:
            return create_transform(**self.data_config, is_training=True)
        return evaluation_transform(self.data_config)

    @property
    def class_names(self) -> list[str] | None:
        """Readable names of the classes, in order; None if unknown."""
        return class_names(self)

    @class_names.setter
    def class_names(self, names: Sequence[str] | None) -> None:
        if names is not None and len(names) != self.num_classes:
            raise InputError(f"each of the {self.num_classes} classes needs a name, got {len(names)}")
        config = {key: value for key, value in (self.vit.pretrained_cfg or {}).items() if not key.startswith("label_")}
        self.vit.pretrained_cfg = config if names is None else {**config, "label_names": list(names)}

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return [{**each, "module": f"vit.{each['module']}"} for each in self.vit.feature_info]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by an untrained one. With 0 classes the model returns pooled features."""
        names = self.class_names if num_classes == self.num_classes else None
        self.vit.reset_classifier(num_classes, global_pool)
        self.class_names = names

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        *,
        positions: Tensor | None = None,
        **placement: Any,
    ) -> Any:
        """timm's method of this name: features after some blocks as maps or sequences, with the final features.

        NCHW is a map (B, D, H / K, W / K): the tokens in their cells on the full grid, otherwise interpolated
        between the nearest tokens, as in `to_map`. NLC is the sequence of tokens (B, N, D).
        """
        model: Any = self
        if output_fmt not in ("NCHW", "NLC"):
            raise InputError(f"the output format must be NCHW or NLC, got {output_fmt!r}")
        wanted = block_indices(self.vit, indices)
        last = wanted[-1] if stop_early or intermediates_only else len(self.vit.blocks) - 1
        taken = model.token_features(images, positions, indices=sorted({*wanted, last}), norm=norm, **placement)
        final = torch.cat([taken[-1].prefix, taken[-1].tokens], 1)
        final = final if norm else self.vit.norm(final)
        taken = taken[: len(wanted)]
        if output_fmt == "NCHW":
            rows, columns = (length // model.patch_size for length in images.shape[-2:])
            features = [model.to_map(each, (rows, columns)) for each in taken]
        else:
            features = [each.tokens for each in taken]
        prefix = [each.prefix for each in taken] if return_prefix_tokens and self.num_prefix_tokens else None
        if output_dict:
            output: dict[str, Any] = {"image_intermediates": features}
            output |= {} if prefix is None else {"image_intermediates_prefix": prefix}
            return output | ({} if intermediates_only else {"image_features": final})
        intermediates: list[Any] = features if prefix is None else list(zip(features, prefix, strict=True))
        return intermediates if intermediates_only else (final, intermediates)

    def no_weight_decay(self) -> set[str]:
        return {f"vit.{name}" for name in self.vit.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {group: _prefixed(patterns) for group, patterns in self.vit.group_matcher(coarse=coarse).items()}


def _named(module: Any) -> Any:
    """timm's name of one or several modules, with the prefix."""
    return f"vit.{module}" if isinstance(module, str) else tuple(f"vit.{each}" for each in module)


def _prefixed(patterns: Any) -> Any:
    """timm's patterns of parameter names, with the prefix; timm matches them from the beginning of a name."""
    if isinstance(patterns, str):
        return rf"^vit\.(?:{patterns.replace('^', '')})"
    if isinstance(patterns, (list, tuple)):
        return type(patterns)(_prefixed(each) for each in patterns)
    return patterns


def block_indices(vit: TimmViT, indices: int | Sequence[int] | None) -> list[int]:
    """The blocks that `indices` selects, in order: the last n if an int, these if a sequence, all if None."""
    try:
        return sorted(set(feature_take_indices(len(vit.blocks), indices)[0]))
    except AssertionError as error:
        raise InputError(f"this ViT has {len(vit.blocks)} blocks, got indices {indices}") from error


def create_timm(name: str, *, pretrained: bool = False, **kwargs: Any) -> TimmViT:
    """timm.create_model, with a clear error for an unknown name or option."""
    architecture = name.split("/")[-1].split(".")[0] if ":" not in name else ""
    if (architecture or not name) and not timm.is_model(architecture):
        raise unknown("timm model", name, timm.list_models())
    try:
        vit = timm.create_model(name, pretrained=pretrained, **kwargs)
    except (TypeError, RuntimeError, ValueError) as error:
        raise InputError(f"timm cannot build {name!r} with {kwargs or 'no options'}: {error}") from error
    if not pretrained and architecture == name:  # timm would set its default tag, although the weights are random
        vit.pretrained_cfg = {**vit.pretrained_cfg, "tag": ""}
    return vit


def refuse_unfit(vit: TimmViT) -> None:
    """Refuse a model whose tokens cannot be placed freely, naming the reason."""
    stem = getattr(vit, "patch_embed", None)
    if not isinstance(vit, (VisionTransformer, Eva)):  # relative position tables or windows of the grid, for example
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
