"""The models of a study: retrofitted ViTs, and the plain ViTs they are based on."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import timm
import torch

from paper.provenance import file_hashes
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.hashes import hash_model
from spot.models.baselines import small_grid
from spot.models.family import Family, Source, at_budget, is_delta, read_delta
from spot.models.loading import load, load_source
from spot.models.shipped import ALIASES, built_in, find
from spot.models.spot_vit import SpotViT, adapt

SCENE_BACKBONES = ("scenes-a", "scenes-b", "scenes-mae")


@dataclass(eq=False)
class Backbone:
    """A retrofitted ViT and, if known, the plain ViT it is based on."""

    name: str  # in tables
    source: str  # for spot.load
    weights: Path | None = None  # of the timm ViT it is based on
    device: Any = "cpu"
    _made: dict[Any, SpotViT] = field(default_factory=dict, init=False)  # a family's models, by budget and image size

    @cached_property
    def loaded(self) -> Source:
        """The family of weights by budget, or the one model."""
        saved = self.source not in built_in() and Path(self.source).exists() and not is_delta(self.source)
        return load_source(self.source, weights=None if saved else self.weights)

    def at(self, tokens: int | None = None, image_size: tuple[int, int] | None = None) -> SpotViT:
        """The model with the weights for a budget, for images of its own size or another."""
        if isinstance(self.loaded, SpotViT):
            return self.loaded.to(self.device)
        if (tokens, image_size) not in self._made:
            self._made[tokens, image_size] = at_budget(self.loaded, tokens, image_size=image_size).to(self.device)
        return self._made[tokens, image_size]

    @property
    def model(self) -> SpotViT:
        """The model with the weights of its default budget, for uses that do not depend on the weights."""
        return self.at()

    @cached_property
    def parent(self) -> SpotViT | None:
        """The original ViT before the retrofit, or None if unknown."""
        path = find(self.source)
        if f"{self.source}-grid" in built_in():
            return load(f"{self.source}-grid").to(self.device)
        if path.is_file() and is_delta(path):
            return load(read_delta(path)[1]["base"], weights=self.weights).to(self.device)
        if self.source in built_in():
            return None
        if path.exists():  # a folder or file that spot saved names its base timm ViT
            if self.weights is None:
                return None
            head = ("num_classes", "global_pool")  # from the file, which stores its pooling and number of classes
            shape = {name: value for name, value in self.model.options.items() if name not in head}
            return load(self.model.name, weights=self.weights, **shape).to(self.device)
        return self.model

    @cached_property
    def hash(self) -> str:
        return self.loaded.hash if isinstance(self.loaded, Family) else hash_model(self.loaded)

    @cached_property
    def parent_hash(self) -> str:
        return "" if self.parent is None else hash_model(self.parent)

    def describe(self) -> dict[str, Any]:
        """The description of a model in results: its name, and hashes of its weights and of its file."""
        return {"source": self.source, "weights": self.hash, **file_hashes(self.source)}


def backbones(sources: Sequence[str], device: Any = "cpu") -> list[Backbone]:
    """Models from `NAME` or `NAME=FILE`, with the weights of the timm ViT that NAME is based on."""
    pairs = [given.partition("=")[::2] for given in sources]
    if len(set(pairs)) < len(pairs):
        raise InputError(f"each model is studied once, got {', '.join(sources)}")
    names = [_short(source) for source, _ in pairs]
    if len(set(names)) < len(names):
        names = [source for source, _ in pairs]
    return [
        Backbone(name, source, Path(weights) if weights else None, device)
        for name, (source, weights) in zip(names, pairs, strict=True)
    ]


def budgets(cells: int) -> tuple[int, ...]:
    """The square numbers nearest to an eighth, a quarter, a half and all of a grid: 25, 49, 100 and 196 of 196."""
    squares = [side * side for side in range(1, int(cells**0.5) + 2)]
    wanted = (cells / 8, cells / 4, cells / 2)
    return tuple(sorted({min(squares, key=lambda square: abs(square - each)) for each in wanted} | {cells}))


def shrinkable(model: SpotViT, budgets: Sequence[int]) -> list[int]:
    """The budgets below the model's grid size for which a smaller image exists."""
    fitting = []
    for tokens in budgets:
        if tokens < len(model.grid()):
            with suppress(InputError):
                small_grid(tokens, *model.img_size)
                fitting.append(tokens)
    return fitting


@cache
def vit_b16() -> SpotViT:
    """The paper's ViT-B/16 without weights, for counting operations."""
    with torch.device("meta"):
        vit = timm.create_model("vit_base_patch16_224")
    return adapt(vit).to("meta")


@cache
def vit_b16_macs(tokens: int) -> int:
    """Multiply-adds of the paper's ViT-B/16 with this many tokens."""
    return macs(vit_b16(), tokens=tokens)


def _short(source: str) -> str:
    """A model's name in tables: without the tag of its weights, or the last part of its path."""
    path = Path(source)
    if source not in built_in() and path.exists():
        return path.stem if path.is_file() else path.name
    source = ALIASES.get(source, source)
    name, plus, _ = source.partition("+")
    return name.split(".")[0] + ("+spot" if plus else "")
