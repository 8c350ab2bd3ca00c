"""The shipped retrofits as timm models, for timm.create_model.

    import spot.timm
    import timm

    model = timm.create_model("spot_vit_tiny_patch16_224", pretrained=True, num_classes=10, tokens=49)

This returns the same `spot.SpotViT` as `spot.load("vit-ti", tokens=49, num_classes=10)`, but in training mode, as timm
returns its models. `pretrained=True` downloads the base ViT's weights through timm. `weights=FILE` or timm's
`pretrained_cfg_overlay=dict(file=FILE)` reads them from a file. `checkpoint_path` loads a checkpoint of timm's
train.py. To run timm's scripts with these names:

    python -m spot.timm validate.py DATA --model spot_vit_tiny_patch16_224 --pretrained --model-kwargs tokens=49
"""

import dataclasses
import runpy
import sys
from typing import Any

from timm.models import generate_default_cfgs, get_pretrained_cfg, register_model, resolve_pretrained_cfg
from timm.models._builder import pretrained_cfg_for_features
from timm.models._features import FeatureGetterNet
from timm.models._pretrained import PretrainedCfg
from torch import nn

from spot.errors import InputError
from spot.models.checkpoints import DATA_KEYS
from spot.models.loading import load
from spot.models.shipped import ALIASES

NAMES = {"spot_vit_tiny_patch16_224": "vit-ti", "spot_deit_tiny_patch16_224": "deit-ti"}  # timm's name → ours


def _base_cfg(name: str) -> PretrainedCfg:
    """The base ViT's configuration, with the names of its first and last layer in a SpotViT."""
    base = get_pretrained_cfg(ALIASES[name].removesuffix("+spot"), allow_unregistered=False)
    return dataclasses.replace(base, classifier=f"vit.{base.classifier}", first_conv=f"vit.{base.first_conv}")


CONFIGS = {name: _base_cfg(alias) for name, alias in NAMES.items()}
default_cfgs = generate_default_cfgs({f"{name}.{config.tag}": config for name, config in CONFIGS.items()})


def _create(
    name: str,
    pretrained: bool,
    *,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    features_only: bool = False,
    out_indices: Any = 3,
    feature_cls: str = "getter",
    **options: Any,
) -> nn.Module:
    """Create a model for timm.create_model.

    Args:
        pretrained_cfg: a tag or a whole configuration. Its `file` contains the base ViT's weights.
        options: arguments of spot.load, such as tokens, prior, scale, and of timm, such as num_classes.
    """
    config = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay)
    for source in ("url", "hf_hub_id", "hf_hub_filename", "state_dict"):
        if getattr(config, source) not in (None, "", getattr(CONFIGS[name], source)):
            raise InputError(f"{name} takes only its base ViT's weights, not others by {source}; give weights=FILE")
    options = {key: value for key, value in options.items() if key != "pretrained_model_args" and value is not None}
    cache_dir = options.pop("cache_dir", None)
    if pretrained:
        options |= {"weights": config.file} if config.file else {}
        options |= {"cache_dir": str(cache_dir)} if cache_dir else {}
    model = load(NAMES[name], pretrained=pretrained, **options)
    model.train()  # as timm returns its models
    data = {key: getattr(config, key) for key in DATA_KEYS if key != "input_size" and getattr(config, key) is not None}
    model.vit.pretrained_cfg = {**model.vit.pretrained_cfg, **data}
    if config.num_classes == -1:  # timm's value for a new head
        model.reset_classifier(model.num_classes)
    if not features_only:
        return model
    if feature_cls != "getter":
        raise InputError(f"{name} has features by its forward_intermediates: feature_cls 'getter', got {feature_cls!r}")
    features: Any = FeatureGetterNet(model, out_indices=out_indices)
    features.pretrained_cfg = features.default_cfg = pretrained_cfg_for_features(model.pretrained_cfg)
    return features


@register_model
def spot_vit_tiny_patch16_224(pretrained: bool = False, **options: Any) -> nn.Module:
    """ViT-Ti/16 retrofitted for 16 to 196 tokens, `vit-ti`."""
    return _create("spot_vit_tiny_patch16_224", pretrained, **options)


@register_model
def spot_deit_tiny_patch16_224(pretrained: bool = False, **options: Any) -> nn.Module:
    """DeiT-Ti/16 retrofitted for 16 to 196 tokens, `deit-ti`."""
    return _create("spot_deit_tiny_patch16_224", pretrained, **options)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m spot.timm SCRIPT.py [its options]: runs one of timm's scripts with these names")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
