import pytest
import torch

from paper.saliency_gain import NEAR_ZERO, relative_gain, score


@pytest.fixture
def half():
    """A 32 × 32 map, drawn by hand: 1 in the right half, 0 in the left."""
    mask = torch.zeros(1, 32, 32)
    mask[:, :, 16:] = 1
    return mask


def places(*pixels):
    """Positions (1, N, 2) of windows centred at (y, x) pixels from the upper left corner."""
    return torch.tensor([pixels], dtype=torch.float32) / 32


def test_the_score_is_the_covered_share_of_the_window(half):
    # Windows of 8 pixels: all left, all right, centred on the edge, two pixels into the right half, beyond it.
    positions = places((16, 4), (16, 24), (16, 16), (16, 18), (16, 40))
    torch.testing.assert_close(score(half, positions, 8), torch.tensor([[0, 1, 0.5, 0.75, 1]]))
    # Between pixels, the column of samples nearest the edge stands half on 0 and half on 1: 3.5 of 8 are covered.
    torch.testing.assert_close(score(half, places((16, 15.5)), 8), torch.tensor([[3.5 / 8]]))


def test_the_gain_of_a_token_is_relative_to_where_it_started(half):
    start, end = places((16, 16), (16, 18), (16, 24)), places((16, 18), (16, 16), (16, 24))
    gain = relative_gain(score(half, start, 8), score(half, end, 8))
    # 0.5 → 0.75 is +50 %, 0.75 → 0.5 is −33 %, 1 → 1 is nothing.
    torch.testing.assert_close(gain, torch.tensor([[0.5, -1 / 3, 0.0]]))


def test_a_token_that_starts_on_nothing_has_no_gain():
    before = torch.tensor([0.0, 0.99 * NEAR_ZERO, 1.01 * NEAR_ZERO])
    gain = relative_gain(before, before + 1)
    assert gain.isnan().tolist() == [True, True, False]
