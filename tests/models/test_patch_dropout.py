"""PatchDropout against timm's own patch embedding, with the dropped patches taken away afterwards."""

import pytest
import torch

from spot.errors import InputError
from spot.models.wrappers import PatchDropout, PlainViT
from tests.conftest import make_nano


def pictures(batch: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_it_is_timm_with_the_other_patches_taken_out():
    model = make_nano(reg_tokens=2)
    images, vit = pictures(), model.vit
    dropout = PatchDropout(model, 7)
    # Which cells were kept follows from where their centres are: 4 × 4 cells of 8 pixels.
    cells = (dropout.place(images, generator=seed()) * 4).floor().long()
    kept = cells[..., 0] * 4 + cells[..., 1]
    tokens = vit._pos_embed(vit.patch_embed(images))
    patches = tokens[:, 3:].gather(1, kept[..., None].expand(-1, -1, 32))
    x = torch.cat([tokens[:, :3], patches], 1)
    for block in vit.blocks:
        x = block(x)
    expected = vit.forward_head(vit.norm(x))
    torch.testing.assert_close(dropout(images, generator=seed()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 15, 16])
def test_exactly_so_many_different_patches_are_kept(tokens):
    model = make_nano()
    positions = PatchDropout(model, tokens).place(pictures(50), generator=seed())
    assert positions.shape == (50, tokens, 2)
    grid = {tuple(position) for position in model.grid().tolist()}
    for placement in positions.tolist():
        assert len({tuple(position) for position in placement} & grid) == tokens


def test_every_patch_is_equally_likely():
    positions = PatchDropout(make_nano(), 4).place(torch.zeros(4000, 3, 32, 32), generator=seed())
    cells = (positions * 4).floor().long()
    counts = torch.bincount((cells[..., 0] * 4 + cells[..., 1]).flatten(), minlength=16)
    # Each is kept in a quarter of 4000 images: 1000 ± 27, here within five standard deviations.
    assert (counts - 1000).abs().max() < 5 * 27.4


def test_all_patches_are_the_plain_vit():
    model = make_nano()
    expected = model.vit(pictures())
    torch.testing.assert_close(PatchDropout(model, 16)(pictures()), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(PlainViT(model)(pictures()), expected)


def test_an_image_s_patches_do_not_depend_on_the_batch():
    dropout, images = PatchDropout(make_nano(), 5), pictures(6)
    generator = seed()
    parts = [dropout.place(images[:2], generator=generator), dropout.place(images[2:], generator=generator)]
    assert torch.equal(torch.cat(parts), dropout.place(images, generator=seed()))


def test_the_budget_can_be_set_and_the_caller_may_place():
    model = make_nano()
    dropout = PatchDropout(model, 5)
    dropout.tokens = 9
    assert dropout.forward_features(pictures()).shape[1] == 1 + 9
    positions = torch.rand(3, 4, 2)
    torch.testing.assert_close(dropout(pictures(), positions), model(pictures(), positions))


@pytest.mark.parametrize(("tokens", "message"), [(17, "at most the 16 patches"), (0, "at least 1"), (2.5, "whole")])
def test_a_budget_the_grid_does_not_have_is_refused(tokens, message):
    with pytest.raises(InputError, match=message):
        PatchDropout(make_nano(), tokens)


def test_an_image_with_fewer_patches_than_the_budget_is_refused():
    with pytest.raises(InputError, match="at most the 4 patches"):
        PatchDropout(make_nano(), 16)(pictures(1, 16))


def test_a_plain_vit_cannot_be_told_where_to_look():
    plain = PlainViT(make_nano())
    with pytest.raises(InputError, match="own grid"):
        plain(pictures(), torch.rand(3, 4, 2))
    with pytest.raises(InputError, match="all 16 tokens of its grid, not 4"):
        plain(pictures(), tokens=4)
    with pytest.raises(InputError, match="a prior goes with its SpotViT"):
        plain(pictures(), prior="uniform")
    torch.testing.assert_close(plain(pictures(), plain.place(pictures())), plain(pictures()))
