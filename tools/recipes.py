"""The recipes of the built-in models, and spot with them: python -m tools.recipes retrofit … --recipe scenes-distil.

They train nano ViTs on scenes. tools/make_assets.py has the commands. The library itself has the recipes `scenes` and
`scenes-retrofit`.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from spot.cli import main
from spot.data.counter_random import keys
from spot.data.difficulty import needle
from spot.data.scenes import CLASSES, Scenes, main_object
from spot.draws import Draw, generator
from spot.placement.priors import isotropic, omega
from spot.training.batches import MicroBatch
from spot.training.objectives import OBJECTIVES, Supervised, one_of
from spot.training.recipes import (
    RECIPES,
    SCENES,
    SCENES_RETROFIT,
    DistilRecipe,
    Fraction,
    MaskedRecipe,
    Recipe,
    SupervisedRecipe,
)


@dataclass(frozen=True)
class NearObjectRecipe(SupervisedRecipe):
    """Cross-entropy with labels, on the scenes `needle`."""

    object_shares: tuple[Fraction, ...] = ()  # shares of the tokens around the object, one drawn per step


class NearObject(Supervised):
    """Cross-entropy with a share of the tokens around the object, unless the step has the grid's number of tokens."""

    recipe: NearObjectRecipe

    def place(self, images: Tensor, batch: MicroBatch, draw: Generator) -> Tensor:
        positions = super().place(images, batch, draw)
        if not self.recipe.object_shares or positions.shape[1] >= self.model.grid(images).shape[1]:
            return positions
        return around_object(positions, batch, one_of(self.recipe.object_shares, draw), self.recipe.seed)


def around_object(positions: Tensor, batch: MicroBatch, share: float, seed: int) -> Tensor:
    """Move the first share of the positions (b, N, 2) into a square around each scene's object.

    The square's side is 32 to 96 pixels. Its centre is at most a sixth of the side from the object's centre, in y
    and in x. Its tokens are on an even grid, with random offsets of up to half a cell.
    """
    tokens, size = round(share * positions.shape[1]), torch.tensor(batch.images.shape[-2:])
    if not tokens:
        return positions
    draw, count = generator(seed, Draw.NEAR, batch.step), batch.batch_size
    side = 32 * 3 ** batch.select(torch.rand(count, 1, 1, generator=draw)) / size
    shift = batch.select(torch.rand(count, 1, 2, generator=draw)) - 0.5
    moves = (batch.select(torch.rand(count, tokens, 2, generator=draw)) - 0.5) / tokens**0.5
    corner = (object_centers(batch, seed)[:, None] + (shift / 3 - 0.5) * side).clamp(min=0).minimum(1 - side)
    inside = (corner + side * (isotropic(batch.images[:1, :, :8, :8].cpu(), tokens) + moves)).to(positions)
    return torch.cat([inside, positions[:, tokens:, :2]], 1).clamp(*omega(batch.images))


def object_centers(batch: MicroBatch, seed: int) -> Tensor:
    """The centres (b, 2) of the objects in a micro-batch of the scenes `needle`: the stream's item p is scene p."""
    places = batch.step * batch.batch_size + batch.first + np.arange(len(batch.images))
    scenes = Scenes("train", difficulty=needle(batch.images.shape[-1]), seed=seed)
    thing = main_object(places % len(CLASSES), keys(scenes.seed, places), scenes.difficulty)
    return torch.from_numpy((thing.center / scenes.difficulty.image_size).astype(np.float32))


def like_scenes(kind: type[Recipe], name: str, **values: Any) -> Recipe:
    """A recipe with the values of `scenes` in the fields that all recipes share, except for the given ones."""
    shared = {field.name: getattr(SCENES, field.name) for field in fields(Recipe)}
    return kind(**{**shared, "name": name, **values})


# fmt: off
BUILT_IN = (
    like_scenes(
        DistilRecipe, "scenes-distil", epochs=1.5, lr=1e-3, warmup_epochs=0.1, priors=SCENES_RETROFIT.priors,
        budgets=((9, 16), (16, 25), (36, 49), (64,)), shares=(0.5, 0.5, 0.5, 0.25), weights=(1.0, 1.0, 1.0, 1.0),
        balance=0.0,
    ),
    like_scenes(
        MaskedRecipe, "scenes-mae", epochs=3, warmup_epochs=0.2, decoder_width=64, decoder_depth=2, decoder_heads=2,
    ),
    like_scenes(
        SupervisedRecipe, "scenes-finetune", epochs=3.5, warmup_epochs=0.2, smoothing=0.0, global_pool="avg",
    ),
    like_scenes(
        SupervisedRecipe, "scenes-needle-crops", img_size=192, epochs=8, smoothing=0.0, budgets=(25, 36, 49, 49, 64),
        priors=("isotropic", "isotropic", "sobol", "uniform"), precision="bf16",
    ),
    like_scenes(
        NearObjectRecipe, "scenes-needle", img_size=192, batch_size=32, epochs=1.2, lr=1e-3, warmup_epochs=0.1,
        smoothing=0.0, ema=0.98, budgets=(49, 64, 64, 64, 100, 144, 576), object_shares=(0.0, 0.4, 0.6, 0.8, 1.0),
        priors=("isotropic", "sobol"), precision="bf16",
    ),
)
# fmt: on

if __name__ == "__main__":
    RECIPES.update({recipe.name: recipe for recipe in BUILT_IN})
    OBJECTIVES[NearObjectRecipe] = NearObject
    main()
