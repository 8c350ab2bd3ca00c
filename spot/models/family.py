"""A family of weights: a pretrained ViT, and the change that a retrofit made to it, blended by budget.

A ViT needs a large change of its weights to read an eighth of its tokens, a small one for half of them, and none on
its own grid. So the weights for N tokens are

    base + share · change,    share = log(cells / N) / log(cells / min_tokens), between 0 and 1

A family holds base and change once and builds an ordinary model for each budget it is asked for.

    family = spot.Family("vit-ti")
    sparse = family.model(tokens=49)        # a SpotViT with the weights for 49 tokens
    dense = family.model(tokens=196)        # timm's own weights, exactly
"""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spot.errors import InputError, check_kind
from spot.hashes import hash_tensors
from spot.models.checkpoints import load_timm, refitted, refuse_steering
from spot.models.deltas import apply_delta, delta_policy, is_delta, read_about
from spot.models.shipped import ALIASES, find
from spot.models.spot_vit import SpotViT
from spot.placement.priors import AnyPrior, check_tokens
from spot.placement.sizes import Scale

STEPS = 16  # shares are rounded to this many steps
DEFAULT_TOKENS = 49  # a quarter of a 14 × 14 grid: the budget in the middle of those a retrofit is trained for


class Family:
    """Weights of one retrofit for every budget. `spot.load(name, tokens=N)` is `Family(name).model(tokens=N)`."""

    def __init__(self, name: str | Path, *, weights: str | Path | None = None, **options: Any) -> None:
        """
        Args:
            name: a shipped retrofit (`vit-ti`, `deit-ti`), or a file that `save_delta` wrote.
            weights: a file with the timm model's weights, instead of a download.
            options: what timm.create_model takes, such as num_classes or cache_dir.
        """
        check_kind("a model's name", name, str, Path)
        path = find(name)
        if not is_delta(path):
            raise InputError(
                f"{name} has no family of weights by budget: only a retrofit that knows the ViT it came from has "
                f"one ({', '.join(ALIASES)}, or a file that save_delta wrote); use spot.load for other models"
            )
        about = read_about(path)
        refuse_steering(about["base"], {}, {})
        cached = {"cache_dir": options.pop("cache_dir")} if "cache_dir" in options else {}
        self.name, self.options = str(name), options
        self._base = load_timm(about["base"], weights, cached)
        self._retrofitted = apply_delta(self._base.vit.state_dict(), path)
        self.hash = hash_tensors(self._retrofitted)  # policies and cascades name the weights they were made for
        self.cells = len(self._base.grid())
        # With this many tokens all of the change is used; None: at every budget. Version 0.2 wrote "fewest".
        self.min_tokens: int | None = about["config"].get("min_tokens", about["config"].get("fewest"))
        self._base.prior = about["config"].get("prior") or "isotropic"
        self._base.scale = about["config"].get("scale")
        self._base.policy = delta_policy(path)
        self._base.retrofit_hash = self.hash
        self._base.eval()

    @property
    def patch_size(self) -> int:
        """K: the side of a window in pixels."""
        return self._base.patch_size

    @property
    def policy(self) -> nn.Module | None:
        """The learned prior that each model gets; None if it has none."""
        return self._base.policy

    @policy.setter
    def policy(self, policy: nn.Module | None) -> None:
        self._base.policy = policy

    @property
    def scale(self) -> Scale | None:
        """The size of the windows that each model places, as in `SpotViT.scale`."""
        return self._base.scale

    @scale.setter
    def scale(self, scale: Scale | None) -> None:
        self._base.scale = scale

    def __repr__(self) -> str:
        return f"Family({self.name!r}, {self._base.name}, budgets up to {self.cells})"

    def share(self, tokens: int, image_size: tuple[int, int] | None = None) -> float:
        """The share of the retrofit's change that N tokens take, for images of the ViT's own size or another (H, W)."""
        if self.min_tokens is None:
            return 1.0
        if image_size is None:
            return share_of_change(tokens, self.cells, self.min_tokens)
        rows, columns = (length // self._base.patch_size for length in image_size)
        return share_of_change(tokens, rows * columns, self.min_tokens)

    def model(
        self,
        tokens: int = DEFAULT_TOKENS,
        *,
        prior: AnyPrior | None = None,
        scale: Scale | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> SpotViT:
        """A new SpotViT with the weights for this budget, which is also its own budget. Nothing is shared or kept.

        Args:
            prior, scale: as in `SpotViT.place`; by default the retrofit's own.
            image_size: (H, W) in pixels of the images it will see; by default what the ViT was built for.
        """
        check_tokens(tokens)
        share = self.share(tokens, image_size)
        with torch.inference_mode(False), torch.no_grad():  # its parameters can learn, wherever it is made
            made = copy.deepcopy(self._base)
            for name, parameter in made.vit.named_parameters():
                parameter.copy_(torch.lerp(parameter, self._retrofitted[name].to(parameter), share))
            return refitted(made, self.options).at(tokens=tokens, prior=prior, scale=scale).eval()


Source = SpotViT | Family  # something that has a model for each budget


def share_of_change(tokens: int, cells: int, min_tokens: int) -> float:
    """How much of a retrofit's change N tokens take, of an image whose grid has this many cells: from 0 to 1."""
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
    """The model for a budget: built by a family, or a SpotViT with its own weights and this placement."""
    if isinstance(source, Family):
        count = DEFAULT_TOKENS if tokens is None else tokens
        return source.model(count, prior=prior, scale=scale, image_size=image_size)
    check_kind("model", source, SpotViT, Family)
    return source.at(tokens=tokens, prior=prior, scale=scale)


def dense_model(source: Source) -> SpotViT:
    """The model on its full grid: of a family, the ViT that was retrofitted."""
    return source.model(source.cells) if isinstance(source, Family) else source.at(tokens=len(source.grid()))


def hash_weights(source: Source) -> str:
    """What policies and cascades know a model's weights by: a hash that changes with any tensor of the ViT."""
    if isinstance(source, Family):
        return source.hash
    return source.retrofit_hash or hash_tensors(source.vit.state_dict())


def full_retrofit(source: Source) -> SpotViT:
    """The weights that training starts from: of a family, with all of its change."""
    return source.model(source.min_tokens or 1) if isinstance(source, Family) else source
