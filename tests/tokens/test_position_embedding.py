"""Position embeddings at continuous positions."""

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spot.errors import InputError
from spot.tokens.position_embedding import GaussianKernels, KernelPositionEmbedding, grid_positions, rotary_embedding


@pytest.mark.parametrize("grid_size", [(14, 14), (7, 21), (1, 5), (37, 37)])
def test_a_fitted_embedding_is_the_table_at_the_tables_own_positions(grid_size):
    table = torch.randn(grid_size[0] * grid_size[1], 24)
    embedding = KernelPositionEmbedding(grid_size, 24).fit(table)
    torch.testing.assert_close(embedding(grid_positions(grid_size)), table, atol=1e-5, rtol=0)


def test_more_centres_than_cells_still_fit_exactly():
    table = torch.randn(7 * 9, 5)
    embedding = KernelPositionEmbedding((12, 20), 5).fit(table, (7, 9))
    torch.testing.assert_close(embedding(grid_positions((7, 9))), table, atol=1e-4, rtol=0)


def test_it_is_a_linear_map_of_gaussian_kernels():
    """Solve for the map by hand, densely, without using that it separates."""
    grid_size, sigma = (4, 6), 0.8
    table = torch.randn(24, 3, dtype=torch.float64)
    centres = grid_positions(grid_size).double()
    cell = torch.tensor(grid_size, dtype=torch.float64)

    def kernels(positions):
        return torch.exp(-0.5 * (((positions[:, None] - centres) * cell / sigma) ** 2).sum(-1))

    weights = torch.linalg.solve(kernels(centres), torch.cat([table, torch.ones(24, 1, dtype=torch.float64)], 1))
    positions = torch.rand(50, 2, dtype=torch.float64)
    values = kernels(positions) @ weights
    expected = values[:, :3] + (1 - values[:, 3:]) * table.mean(0)  # what is missing goes to the mean
    embedding = KernelPositionEmbedding(grid_size, 3, sigma).fit(table.float())
    torch.testing.assert_close(embedding(positions.float()), expected.float(), atol=1e-4, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.floats(-0.5, 1.5), st.floats(-0.5, 1.5))
def test_a_constant_table_is_constant_everywhere(y, x):
    embedding = KernelPositionEmbedding((5, 8), 2).fit(torch.full((40, 2), 3.0))
    torch.testing.assert_close(embedding(torch.tensor([y, x])), torch.full((2,), 3.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "eva02_tiny_patch14_224",
        "vit_small_patch16_dinov3",
        "vit_small_patch16_rope_224",
        "vit_small_patch16_rope_mixed_224",
    ],
)
def test_rotary_angles_at_cell_centres_are_timms(name):
    vit = timm.create_model(name, img_size=(5 * 16, 8 * 16) if "patch16" in name else (5 * 14, 8 * 14), depth=1)
    ours = rotary_embedding(vit.rope, grid_positions((5, 8))[None], (5, 8))
    theirs = vit.rope.get_embed(shape=(5, 8)) if vit.dynamic_img_size else vit.rope.get_embed()
    torch.testing.assert_close(ours.squeeze(), theirs.squeeze(), atol=2e-5, rtol=0)


def test_bad_input_is_named():
    with pytest.raises(InputError, match="shape"):
        KernelPositionEmbedding((3, 3), 4).fit(torch.zeros(8, 4))
    with pytest.raises(InputError, match="sigma"):
        GaussianKernels((3, 3), 0)
    with pytest.raises(InputError, match="no continuous form"):
        rotary_embedding(torch.nn.Identity(), torch.zeros(1, 1, 2), (3, 3))
