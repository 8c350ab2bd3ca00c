"""A family of weights: interpolates between a pretrained ViT and its retrofit according to the budget.

A ViT needs a large change of its weights for an eighth of its tokens, a small change for half of them, and none on
its own grid. The weights for N tokens are therefore

    base + share · change,    share = log(cells / N) / log(cells / min_tokens), between 0 and 1

A family holds base and change once, and builds an ordinary model for each requested budget.

    family = spot.Family("vit-ti")
    sparse = family.model(tokens=49)        # a SpotViT with the weights for 49 tokens
    dense = family.model(tokens=196)        # timm's own weights, exactly

The change is stored as a delta, a safetensors file (`save_delta`). Its header contains its base (timm's name and a
hash of the base's tensors) and the retrofit's placement options. It cannot be applied to any other base. Unchanged
tensors are left out. Changes of matrices are stored as int8 with a scale per row, a quarter of float32's size:

    name            int8 with `name|scale` (rows, 1) float32; float16 for vectors
    policy.name     float32: the weights of the learned prior, if there is one
"""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot.errors import InputError, check_kind
from spot.hashes import hash_tensors
from spot.models.checkpoints import check_base, load_timm, refuse_misfit, with_options
from spot.models.shipped import ALIASES, find
from spot.models.spot_vit import SpotViT
from spot.placement.policy import Policy, build_policy
from spot.placement.priors import AnyPrior, check_tokens
from spot.placement.sizes import Scale
from spot.store import has_kind, read_tensors, write_tensors

STEPS = 16  # shares are rounded to this many steps
DEFAULT_TOKENS = 49  # a quarter of a 14 × 14 grid: the middle of the budgets that a retrofit is trained for
KEY, FORMAT = "spot_delta", 1  # of a delta's header
ROW_SCALE, POLICY = "|scale", "policy."  # end and beginning of names in a delta


class Family:
    """Weights of one retrofit for every budget. `spot.load(name, tokens=N)` is `Family(name).model(tokens=N)`."""

    def __init__(self, name: str | Path, *, weights: str | Path | None = None, **options: Any) -> None:
        """
        Args:
            name: a shipped retrofit (`vit-ti`, `deit-ti`), or a file that `save_delta` wrote.
            weights: a file with the timm model's weights, instead of a download.
            options: options of timm.create_model, such as num_classes or cache_dir.
        """
        check_kind("a model's name", name, str, Path)
        path = find(name)
        if not is_delta(path):
            raise InputError(
                f"{name} has no family of weights by budget: only a retrofit that is stored as a delta has "
                f"one ({', '.join(ALIASES)}, or a file that save_delta wrote); use spot.load for other models"
            )
        _, about = read_delta(path)
        config = about["config"]
        check_base(about["base"])
        cached = {"cache_dir": options.pop("cache_dir")} if "cache_dir" in options else {}
        self.name, self.options = str(name), options
        self._base = load_timm(about["base"], weights, cached)
        self._retrofitted = apply_delta(self._base.vit.state_dict(), path)
        self.hash = hash_tensors(self._retrofitted)  # stored in policies and cascades to identify the weights
        self.cells = len(self._base.grid())
        # At this budget and below the full change is used; None: at every budget. Version 0.2 wrote "fewest".
        self.min_tokens: int | None = config.get("min_tokens", config.get("fewest"))
        self.patch_size = self._base.patch_size
        self.scale: Scale | None = config.get("scale")  # window size of each model's placement, as in SpotViT.scale
        self._base.prior = config.get("prior") or "isotropic"
        self._base.policy = delta_policy(path)
        self._base.weights_hash = self.hash
        self._base.eval()

    def __repr__(self) -> str:
        return f"Family({self.name!r}, {self._base.name}, budgets up to {self.cells})"

    def share(self, tokens: int, image_size: tuple[int, int] | None = None) -> float:
        """The share of the retrofit's change for N tokens, for images of the ViT's own size or another (H, W)."""
        if self.min_tokens is None:
            return 1.0
        cells = math.prod(length // self.patch_size for length in image_size) if image_size else self.cells
        return share_of_change(tokens, cells, self.min_tokens)

    def model(
        self,
        tokens: int = DEFAULT_TOKENS,
        *,
        prior: AnyPrior | None = None,
        scale: Scale | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> SpotViT:
        """A new SpotViT with the weights for this budget and this default budget. Shares nothing with other models.

        Args:
            prior, scale: as in `SpotViT.place`; by default the retrofit's own.
            image_size: (H, W) in pixels of the images to process; by default the size the ViT was built for.
        """
        check_tokens(tokens)
        share = self.share(tokens, image_size)
        scale = self.scale if scale is None else scale
        with torch.inference_mode(False), torch.no_grad():  # so that its parameters can always be trained
            model = copy.deepcopy(self._base)
            for name, parameter in model.vit.named_parameters():
                parameter.copy_(torch.lerp(parameter, self._retrofitted[name].to(parameter), share))
            return with_options(model, self.options).at(tokens=tokens, prior=prior, scale=scale).eval()


Source = SpotViT | Family  # provides a model for each budget


def share_of_change(tokens: int, cells: int, min_tokens: int) -> float:
    """The share of a retrofit's change, from 0 to 1, for N tokens of an image whose grid has this many cells."""
    if tokens >= cells or min_tokens >= cells:
        return float(tokens < cells)
    share = math.log(cells / tokens) / math.log(cells / min_tokens)
    return min(1.0, max(1, round(share * STEPS)) / STEPS)


def at_budget(
    source: Source,
    tokens: int | None = None,
    *,
    prior: AnyPrior | None = None,
    scale: Scale | None = None,
    image_size: tuple[int, int] | None = None,
) -> SpotViT:
    """The model for a budget: built by a family, or a given SpotViT with this placement."""
    if isinstance(source, Family):
        count = DEFAULT_TOKENS if tokens is None else tokens
        return source.model(count, prior=prior, scale=scale, image_size=image_size)
    check_kind("model", source, SpotViT, Family)
    return source.at(tokens=tokens, prior=prior, scale=scale)


def dense_model(source: Source) -> SpotViT:
    """The model on its full grid; for a family, the original ViT."""
    return source.model(source.cells) if isinstance(source, Family) else source.at(tokens=len(source.grid()))


def hash_weights(source: Source) -> str:
    """The hash by which policies and cascades identify a model's weights; it changes with any tensor of the ViT."""
    if isinstance(source, Family):
        return source.hash
    return source.weights_hash or hash_tensors(source.vit.state_dict())


# Retrofits as deltas, on disk


def save_delta(
    model: SpotViT,
    base_state: Mapping[str, Tensor],
    path: str | Path,
    *,
    base: str,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Save the difference between `model.vit` and its base, and the model's policy if it has one.

    Args:
        base_state: the base's tensors under timm's names.
        base: timm's name of the base, with its tag.
        config: JSON values to store: prior, scale and min_tokens, the budget at which the full change is applied.
    """
    state = model.vit.state_dict()
    refuse_misfit("the base", base_state, state)
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        change = tensor.detach().cpu().float() - base_state[name].cpu().float()
        if change.any():
            stored |= pack(name, change)
    config = dict(config or {})
    if isinstance(model.policy, Policy):
        config["policy"] = model.policy.describe()
        stored |= {POLICY + name: tensor for name, tensor in model.policy.state_dict().items()}
    about = {"format": FORMAT, "base": base, "hash": hash_tensors(base_state), "config": config}
    write_tensors(path, stored, KEY, about)


def pack(name: str, change: Tensor) -> dict[str, Tensor]:
    """A change in its stored form. Vectors, including tokens, are float16."""
    matrix = change.flatten(1) if change.ndim > 1 else change[None]
    if min(matrix.shape) == 1:
        return {name: change.half()}
    scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return {name: (matrix / scale).round().to(torch.int8).view(change.shape).contiguous(), name + ROW_SCALE: scale}


def is_delta(path: str | Path) -> bool:
    """Whether a file is a delta; a damaged file is not."""
    return has_kind(path, KEY)


def read_delta(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The stored tensors of a delta, and its header: base, hash and config."""
    stored, about = read_tensors(path, KEY, "a delta")
    if about.get("format") != FORMAT:
        raise InputError(f"{path} is a delta in format {about.get('format')!r}; this version reads {FORMAT}")
    if not (isinstance(about.get("base"), str) and "hash" in about and isinstance(about.get("config"), dict)):
        raise InputError(f"{path} is a damaged delta: its header names no base, or no configuration")
    return stored, about


def apply_delta(base_state: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Base plus delta: all tensors under timm's names. Refuses bases other than the delta's own."""
    stored, about = read_delta(path)
    base = hash_tensors(base_state)
    if base != about["hash"]:
        raise InputError(
            f"{Path(path).name} is a delta on {about['base']} (tensors {about['hash']}), "
            f"but these weights are others ({base}); give that checkpoint's weights"
        )
    state = {name: tensor.clone() for name, tensor in base_state.items()}
    for name, change in stored.items():
        if name.endswith(ROW_SCALE) or name.startswith(POLICY):
            continue  # scales are read with their tensor; policies are not part of the ViT
        if name not in state or change.numel() != state[name].numel():
            raise InputError(f"{path} is a damaged delta: {name} does not fit its base")
        change = change.float()
        if name + ROW_SCALE in stored:
            scale = stored[name + ROW_SCALE]
            if not change.ndim or scale.shape != (len(change), 1):
                raise InputError(f"{path} is a damaged delta: the scale of {name} does not fit it")
            change = change.view(len(change), -1) * scale
        state[name] = (state[name].float() + change.view(state[name].shape)).to(state[name].dtype)
    return state


def delta_policy(path: str | Path) -> Policy | None:
    """The policy in a delta's file, or None."""
    stored, about = read_delta(path)
    description = about["config"].get("policy")
    if description is None:
        return None
    state = {name.removeprefix(POLICY): tensor for name, tensor in stored.items() if name.startswith(POLICY)}
    return build_policy(description, state, str(path))
