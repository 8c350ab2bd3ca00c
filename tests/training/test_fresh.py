import pytest
import torch

from spot.errors import InputError
from spot.training.fresh import fresh

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}


def test_a_seed_gives_one_model():
    first, again, other = (fresh("vit_tiny_patch16_224", SHAPE, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["vit.head.weight"], other["vit.head.weight"])


def test_positions_start_as_waves_that_tell_every_cell_apart():
    table = fresh("vit_tiny_patch16_224", SHAPE).vit.pos_embed.detach()[0]
    assert not table[0].any()  # the class token stands nowhere
    distances = torch.cdist(table[1:], table[1:])
    assert (distances + torch.eye(16) * 9).min() > 0.3
    # Columns share their x waves (the second half) and rows their y waves.
    cells = table[1:].unflatten(0, (4, 4))
    torch.testing.assert_close(cells[:1, :, 16:].expand(4, -1, -1), cells[:, :, 16:])
    torch.testing.assert_close(cells[:, :1, :16].expand(-1, 4, -1), cells[:, :, :16])


@pytest.mark.parametrize(
    "option", [{"num_heads": 0}, {"num_heads": 5}, {"embed_dim": 0}, {"patch_size": 0}, {"depth": -1}]
)
def test_a_vit_that_cannot_be_built_is_one_sentence(option):
    (name,) = option
    with pytest.raises(InputError, match=f"timm cannot build.*{name}"):
        fresh("vit_tiny_patch16_224", {**SHAPE, **option})
