"""Other targets of a policy than class attention: tried, and worse (docs/results/ablations/learned-placement.md).

    occlusion    how much the dense ViT's prediction changes where a part of the grid is left out (KL)
    trials       few tokens are placed around each of 17 points in turn; the points at which the model then agrees
                 with the dense ViT (KL) are the important ones
    oracle       where tokens stand after a search for the dense ViT's prediction (SPoT-ON)

`import paper.targets` adds them to `spot.training.learn.TARGETS`; then
`learn(source, data, out, LearnOptions(target="trials"))` trains a policy.
"""

import torch
from torch import Tensor

from spot.models.spot_vit import SpotViT
from spot.options import LearnOptions
from spot.placement.oracle import PRESETS, search
from spot.placement.priors import spread
from spot.placement.sizes import resolve_scale, sized
from spot.training.learn import TARGETS, density, divergence, seen_by

LEFT_OUT = 7  # occlusion leaves out each of 7 × 7 parts of the grid
POINTS, WIDTH, TEMPERATURE = 4, 0.15, 1.0  # trials: a side of the grid of points, width of a bump, of the softmax
PLACES = (torch.arange(28) + 0.5) / 28  # the cells of such maps, along a side


@torch.no_grad()
def occlusion(model: SpotViT, teacher: SpotViT, images: Tensor, how: LearnOptions) -> Tensor:
    """What leaving out a part of the grid does to the dense ViT's answer: KL for each of 7 × 7 parts."""
    images = seen_by(teacher, model, images)
    grid = teacher.grid(images)
    full = teacher(images, grid).softmax(1)
    part = ((grid[0] * LEFT_OUT).long().clamp(max=LEFT_OUT - 1) * grid.new_tensor([LEFT_OUT, 1]).long()).sum(1)
    changes = [divergence(full, teacher(images, grid[:, part != number])) for number in range(LEFT_OUT**2)]
    return density(torch.stack(changes, 1).unflatten(1, (LEFT_OUT, LEFT_OUT)) + 1e-4)


@torch.no_grad()
def trials(model: SpotViT, teacher: SpotViT, images: Tensor, how: LearnOptions) -> Tensor:
    """A mixture of bumps, weighed by how well the model agrees with the dense ViT on tokens placed around each."""
    full = teacher(seen_by(teacher, model, images), teacher.grid(images)).softmax(1)
    bumps = bumps_at()
    losses = []
    for bump in bumps:
        positions = spread(bump.double().expand(len(images), -1, -1), how.strength, images, how.tokens)
        size = resolve_scale(model.scale, how.tokens, images, model.patch_size)
        losses.append(divergence(full, model(images, sized(positions, size))))
    weights = (-torch.stack(losses, 1) / TEMPERATURE).softmax(1)
    return torch.einsum("bk,kij->bij", weights, bumps.to(weights))


def oracle(model: SpotViT, teacher: SpotViT, images: Tensor, how: LearnOptions) -> Tensor:
    """A bump around each token after a search, from isotropic, that makes few tokens say what the dense ViT says."""
    with torch.no_grad():
        dense = teacher(seen_by(teacher, model, images), teacher.grid(images))
    start = model.place(images, tokens=how.tokens, prior="isotropic")
    found = search(model, images, None, start, PRESETS["agree"], dense=dense).positions[..., :2]
    width = 0.5 / how.tokens**0.5
    y, x = (torch.exp(-((PLACES.to(found) - at[..., None]) ** 2) / (2 * width**2)) for at in found.unbind(-1))
    return density(torch.einsum("bni,bnj->bij", y, x))


def bumps_at() -> Tensor:
    """Densities (K, 28, 28) around a grid of points, and the middle."""
    points = (torch.arange(POINTS) + 1) / (POINTS + 1)
    centres = [*torch.cartesian_prod(points, points), torch.tensor([0.5, 0.5])]
    bumps = [torch.exp(-((PLACES[:, None] - y) ** 2 + (PLACES - x) ** 2) / (2 * WIDTH**2)) for y, x in centres]
    return density(torch.stack(bumps))


TARGETS |= {"occlusion": occlusion, "trials": trials, "oracle": oracle}
