"""A family of weights: interpolates between a pretrained ViT and its retrofit according to the budget.

A ViT needs a large change of its weights for an eighth of its tokens, a small change for half of them, and none on
its own grid. The weights for N tokens are therefore

    base + share · change,    share = log(cells / N) / log(cells / min_tokens), between 0 and 1

A family holds base and change once, and builds an ordinary model for each requested budget.

    family = spot.Family("vit-ti")
    sparse = family.model(tokens=49)        # a SpotViT with the weights for 49 tokens
    dense = family.model(tokens=196)        # timm's own weights, exactly
"""

import copy
import math
from pathlib import Path
from typing import Any

import torch

from spot.errors import InputError, check_kind
from spot.hashes import hash_tensors
from spot.models.checkpoints import check_base, load_timm, with_options
from spot.models.deltas import apply_delta, delta_policy, is_delta, read_delta
from spot.models.shipped import ALIASES, find
from spot.models.spot_vit import SpotViT
from spot.placement.priors import AnyPrior, check_tokens
from spot.placement.sizes import Scale

STEPS = 16  # shares are rounded to this many steps
DEFAULT_TOKENS = 49  # a quarter of a 14 × 14 grid: the middle of the budgets that a retrofit is trained for


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
        self._base.retrofit_hash = self.hash
        self._base.eval()

    def __repr__(self) -> str:
        return f"Family({self.name!r}, {self._base.name}, budgets up to {self.cells})"

    def share(self, tokens: int, image_size: tuple[int, int] | None = None) -> float:
        """The share of the retrofit's change for N tokens, for images of the ViT's own size or another (H, W)."""
        if self.min_tokens is None:
            return 1.0
        if image_size is None:
            return share_of_change(tokens, self.cells, self.min_tokens)
        rows, columns = (length // self.patch_size for length in image_size)
        return share_of_change(tokens, rows * columns, self.min_tokens)

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
    return source.retrofit_hash or hash_tensors(source.vit.state_dict())
