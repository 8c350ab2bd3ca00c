"""A gradient-free search that can be restricted to a grid: move some tokens, keep the moves that help.

The gradient of a window covers one pixel to each side, but not the next cell, 16 pixels away. A search that is
restricted to a grid therefore works differently: in every forward pass each image tries a random move of some of its
tokens, and keeps the move if its objective decreases. The search off the grid makes the same moves. The only
difference is that moves on the grid are rounded to whole cells.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from spot.placement.oracle import Model, SearchResult, descent, frozen, snapped
from spot.placement.priors import draw_rows

REACH = 1.5  # cells: on the grid a token stays or moves to one of its eight neighbours, all equally likely
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
    """Increase the label's probability by trying moves; the result has the start (step 0) and the end (step 1).

    Args:
        model: any callable of images (B, C, H, W) and positions (B, N, 2); returns logits (B, classes).
        labels: class indices (B,).
        positions: the start; on the grid, rounded to the nearest cells.
        grid: (rows, columns); also determines the size of moves off the grid.
        passes: number of forward passes; a step of the gradient search costs 2.2 forward passes.
        on_grid: only centres of cells, and no two tokens move into the same cell.
        keys: names of the images; each image's moves then depend only on its name.
    """
    size = (images.shape[-2], images.shape[-1])
    reach = REACH * positions.new_tensor(size) / positions.new_tensor(grid)  # in pixels

    def draw(rows: slice, generator: Generator | None) -> Tensor:
        count = len(positions[rows])
        return torch.rand(count, passes - 1, positions.shape[1], 3, generator=generator)

    numbers = draw_rows(draw, len(images), None, keys, 0).to(positions.device)
    moves = (2 * numbers[..., :2] - 1) * reach * (numbers[..., 2:] < SHARE)
    here = snapped(positions, grid) if on_grid else moved(positions, 0, size)
    with frozen(model):
        logits = model(images, here)
        loss = descent(logits, labels)
        kept = [(here, loss, logits)]
        for number in range(passes - 1):
            there = moved(here, moves[:, number], size)
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
    """Moves (B, N, 2) without those that would put two tokens into the same cell."""
    while True:
        moved = (there != here).any(-1)
        shared = (there[:, :, None] == there[:, None]).all(-1).sum(-1) > 1
        if not (moved & shared).any():
            return there
        there = torch.where((moved & shared)[..., None], here, there)


def moved(positions: Tensor, pixels: Tensor | float, size: tuple[int, int]) -> Tensor:
    """Positions (…, 2 or 3) moved by pixels (…, 2), but not beyond the centres of the outermost pixels."""
    shape = positions.new_tensor(size)
    edge = 0.5 / shape
    return torch.cat([(positions[..., :2] + pixels / shape).clamp(edge, 1 - edge), positions[..., 2:]], -1)


def jittered(positions: Tensor, pixels: float, size: tuple[int, int], generator: Generator | None = None) -> Tensor:
    """Each coordinate moved by a uniformly random amount between −pixels and +pixels."""
    noise = torch.rand(*positions.shape[:-1], 2, generator=generator).to(positions)
    return moved(positions, (2 * noise - 1) * pixels, size)


def whole_pixels(positions: Tensor, size: tuple[int, int], window: int) -> Tensor:
    """Each position moved to the nearest one at which a window of this many pixels needs no interpolation."""
    corner = positions[..., :2] * positions.new_tensor(size) - window / 2
    return moved(positions, corner.round() - corner, size)
