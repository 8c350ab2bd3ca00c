"""Searching by trials: it finds what a model wants, on cells that no two tokens share, and never gets worse."""

import pytest
import torch

from paper.trial_search import trial_search
from spot.placement.oracle import snapped

GRID = (8, 8)
IMAGES, LABELS = torch.zeros(6, 3, 64, 64), torch.zeros(6, dtype=torch.int64)
START = 0.7 + 0.1 * torch.rand(6, 4, 2, generator=torch.Generator().manual_seed(0))


def wants_the_corner(images, positions):
    """Class 0 is the more probable the nearer tokens are to the upper left corner."""
    near = -positions[..., :2].mean((1, 2))
    return torch.stack([8 * near, torch.zeros_like(near)], 1)


@pytest.mark.parametrize("on_grid", [True, False])
def test_more_passes_come_nearer_to_what_the_model_wants(on_grid):
    losses = [
        trial_search(wants_the_corner, IMAGES, LABELS, START, GRID, passes=passes, on_grid=on_grid, keys=list("abcdef"))
        for passes in (1, 8, 64)
    ]
    ends = [each.losses[:, 1] for each in losses]
    assert torch.equal(losses[0].positions, losses[0].trajectory[:, 0])  # one pass is the start
    assert (ends[1] <= ends[0]).all() and (ends[2] < ends[1]).all()
    assert (ends[2] < losses[2].losses[:, 0]).all()
    again = wants_the_corner(IMAGES, losses[2].positions)
    torch.testing.assert_close(again, losses[2].logits[:, 1])


def test_on_the_grid_every_token_is_a_cell_of_its_own():
    start = torch.tensor([[[0.1, 0.1], [0.4, 0.1], [0.7, 0.1], [0.9, 0.1]]]).expand(6, -1, -1)
    made = trial_search(wants_the_corner, IMAGES, LABELS, start, GRID, passes=40, on_grid=True).positions
    assert torch.equal(made, snapped(made, GRID))
    assert all(len(image.unique(dim=0)) == 4 for image in made)


def test_an_images_moves_depend_on_its_key_and_not_on_its_batch():
    how = {"passes": 9, "on_grid": False}
    together = trial_search(wants_the_corner, IMAGES, LABELS, START, GRID, keys=list("abcdef"), **how)
    alone = trial_search(wants_the_corner, IMAGES[2:3], LABELS[2:3], START[2:3], GRID, keys=["c"], **how)
    torch.testing.assert_close(together.positions[2:3], alone.positions)
