"""Moves that a search is judged by: as far, no further than asked, whole pixels, and always in the image."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paper.trial_search import jittered, moved, whole_pixels
from spot.placement.oracle import moved_at_random, snapped
from spot.tokens.windows import windows

SIZE = (224, 224)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def positions(count=40, columns=2):
    return moved(torch.rand(3, count, columns, generator=seeded(1)), 0, SIZE)


def test_tokens_move_as_far_as_they_are_apart_in_directions_that_average_out():
    start = 0.3 + 0.4 * torch.rand(50, 40, 2, generator=seeded(1))  # far from the edges
    end = snapped(start, (14, 14))
    moved = moved_at_random(start, end, SIZE, seeded())
    wanted, made = ((end - start) * 224).norm(dim=-1), ((moved - start) * 224).norm(dim=-1)
    torch.testing.assert_close(made, wanted, atol=1e-3, rtol=1e-3)
    assert ((moved - start).mean((0, 1)) * 224).abs().max() < 0.5  # no direction is preferred
    assert (moved - end).abs().max() > 0.01  # and it is not the grid again


def test_near_the_edges_too_every_token_moves_as_far_and_stays_in_the_image():
    size, start = torch.tensor([32.0, 64.0]), torch.rand(16, 40, 2, generator=seeded()) * 0.9 + 0.05
    end = start + torch.tensor([0.0, 3 / 64])
    moved = moved_at_random(start, end, (32, 64), seeded(1), tries=32)
    torch.testing.assert_close(((moved - start) * size).norm(dim=-1), torch.full((16, 40), 3.0), atol=1e-3, rtol=0)
    assert ((moved * size - size / 2).abs() <= size / 2 - 0.5 + 1e-4).all()
    angles = torch.atan2(*(moved - start).unbind(-1))
    assert angles.std() > 1.5  # everywhere: uniform on a circle has 1.8


@settings(max_examples=20, deadline=None)
@given(height=st.integers(8, 300), width=st.integers(8, 300), pixels=st.floats(0, 50), columns=st.sampled_from([2, 3]))
def test_whatever_moves_stays_in_the_image_and_keeps_its_scale(height, width, pixels, columns):
    size = (height, width)
    start = torch.rand(2, 9, columns, generator=seeded(2))
    for made in (
        jittered(start, pixels, size, seeded()),
        moved_at_random(start, start.flip(1), size, seeded()),
        whole_pixels(start, size, 4),
    ):
        edge = 0.5 / torch.tensor(size)
        assert (made[..., :2] >= edge - 1e-6).all() and (made[..., :2] <= 1 - edge + 1e-6).all()
        assert torch.equal(made[..., 2:], start[..., 2:])


def test_windows_at_whole_pixels_are_crops():
    """Even and odd windows: every sample is a pixel of the image, so it is found among them unchanged."""
    image = torch.arange(24 * 24.0).view(1, 1, 24, 24)
    start = 0.3 + 0.4 * torch.rand(1, 20, 2, generator=seeded(1))
    for side in (4, 5):
        made = whole_pixels(start, (24, 24), side)
        values = windows(image, made, side)
        torch.testing.assert_close(values, values.round(), atol=1e-3, rtol=0)
        assert ((made - start).abs() * 24).max() <= 0.5 + 1e-4
