"""A search that needs no gradient, so that it can be held to a grid: move some tokens, keep what helps.

The gradient of a window sees a pixel to each side and knows nothing of the next cell, 16 pixels away. So a search
that is confined to a grid is given another way: in every forward pass each image tries a random move of some of its
tokens, and keeps it where its objective is lower. The same moves off the grid are the rival that has nothing but the
grid less: on the grid a move is rounded to whole cells, off it it is not.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from spot.errors import InputError
from spot.placement.oracle import Model, SearchResult, descent, frozen, inside, shifted, snapped
from spot.placement.priors import drawn

REACH = 1.5  # cells: on the grid a move is to this cell or one of its eight neighbours, all equally likely
SHARE = 0.5  # of the tokens that move in a pass


@torch.no_grad()
def trial_search(
    model: Model,
    images: Tensor,
    labels: Tensor,
    positions: Tensor,
    grid: tuple[int, int],
    *,
    passes: int,
    on_grid: bool,
    keys: Sequence[str] | None = None,
) -> SearchResult:
    """Make the label more probable by trying moves: the start (step 0) and what was kept (step 1).

    Args:
        model: any callable of images (B, C, H, W) and positions (B, N, 2); returns logits (B, classes).
        labels: class indices (B,).
        positions: where to start; on the grid, from the nearest cells.
        grid: (rows, columns); they set the size of moves off the grid too.
        passes: how often the model is called; a step of the gradient search costs 2.2 forward passes.
        on_grid: only centres of cells, and no two tokens move into one.
        keys: names of the images; each one's moves are then drawn from its name alone.
    """
    if passes < 1:
        raise InputError(f"a search by trials takes at least 1 forward pass, got {passes}")
    size = (images.shape[-2], images.shape[-1])
    reach = REACH * positions.new_tensor(size) / positions.new_tensor(grid)  # in pixels

    def draw(rows: slice, generator: Generator | None) -> Tensor:
        count = len(positions[rows])
        return torch.rand(count, passes - 1, positions.shape[1], 3, generator=generator)

    numbers = drawn(draw, len(images), None, keys, 0).to(positions.device)
    moves = (2 * numbers[..., :2] - 1) * reach * (numbers[..., 2:] < SHARE)
    here = snapped(positions, grid) if on_grid else inside(positions, size)
    with frozen(model):
        logits = model(images, here)
        loss = descent(logits, labels)
        kept = [(here, loss, logits)]
        for number in range(passes - 1):
            there = inside(shifted(here, moves[:, number], size), size)
            there = _apart(snapped(there, grid), here) if on_grid else there
            tried = model(images, there)
            new = descent(tried, labels)
            better = new < loss
            here = torch.where(better[:, None, None], there, here)
            loss, logits = torch.where(better, new, loss), torch.where(better[:, None], tried, logits)
        kept.append((here, loss, logits))
    trajectory, losses, outputs = (torch.stack(column, 1) for column in zip(*kept, strict=True))
    return SearchResult(trajectory, losses, outputs, torch.ones_like(labels), labels)


def _apart(there: Tensor, here: Tensor) -> Tensor:
    """Moves (B, N, 2) without those that would put two tokens into one cell."""
    while True:
        moved = (there != here).any(-1)
        shared = (there[:, :, None] == there[:, None]).all(-1).sum(-1) > 1
        if not (moved & shared).any():
            return there
        there = torch.where((moved & shared)[..., None], here, there)


def jittered(positions: Tensor, pixels: float, size: tuple[int, int], generator: Generator | None = None) -> Tensor:
    """Each coordinate moved by a random amount between −pixels and +pixels, all equally likely."""
    noise = torch.rand(*positions.shape[:-1], 2, generator=generator).to(positions)
    return inside(shifted(positions, (2 * noise - 1) * pixels, size), size)


def whole_pixels(positions: Tensor, size: tuple[int, int], window: int) -> Tensor:
    """Each position moved to the nearest one whose window of so many pixels needs no interpolation."""
    corner = positions[..., :2] * positions.new_tensor(size) - window / 2
    return inside(shifted(positions, corner.round() - corner, size), size)
