"""The plain ViT, PatchDropout, a smaller image and elastic windows, against timm's own parts."""

import pytest
import timm
import torch
from torchvision.transforms.v2.functional import resize

import spot
from paper.backbone import shrinkable
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.models.baselines import ElasticViT, PatchDropout, Resize, small_grid
from spot.models.wrappers import PlainViT
from tests.conftest import make_nano


def pictures(batch: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def still(model, tokens=None):
    """Elastic windows that neither move nor change their size."""
    return ElasticViT(model, tokens, shift=0, scale=(1.0, 1.0))


@pytest.mark.parametrize("kind", [PlainViT, PatchDropout, Resize, still])
def test_with_all_patches_it_is_timms_model(kind):
    model = make_nano()
    torch.testing.assert_close(kind(model)(pictures()), model.vit(pictures()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [PatchDropout, still])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_different_patches_of_the_grid_are_kept_and_do_not_depend_on_the_batch(kind, tokens):
    baseline, images, generator = kind(make_nano(), tokens), pictures(20), seed()
    positions = baseline.place(images, generator=seed())
    assert positions.shape[:2] == (20, tokens)
    grid = {tuple(position) for position in baseline.model.grid().tolist()}
    for placement in positions[..., :2].tolist():
        assert len({tuple(position) for position in placement} & grid) == tokens
    parts = [baseline.place(part, generator=generator) for part in (images[:2], images[2:])]
    assert torch.equal(positions, torch.cat(parts))


@pytest.mark.parametrize("kind", [PatchDropout, Resize, ElasticViT])
def test_the_caller_may_place(kind):
    model, positions = make_nano(), torch.rand(3, 4, 2)
    images = resize(pictures(), [16, 16], interpolation=3, antialias=True) if kind is Resize else pictures()
    torch.testing.assert_close(kind(model)(pictures(), positions), model(images, positions), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [PatchDropout, Resize, ElasticViT])
@pytest.mark.parametrize(("tokens", "message"), [(17, "at most the 16 patches"), (0, "at least 1"), (2.5, "whole")])
def test_a_budget_the_grid_does_not_have_is_refused(kind, tokens, message):
    with pytest.raises(InputError, match=message):
        kind(make_nano(), tokens)
    with pytest.raises(InputError, match="at most the 4 patches"):
        kind(make_nano(), 16)(pictures(1, 16))


def test_a_plain_vit_has_its_own_grid_and_nothing_else():
    plain = PlainViT(make_nano())
    with pytest.raises(InputError, match="own grid"):
        plain(pictures(), torch.rand(3, 4, 2))
    with pytest.raises(InputError, match="all 16 tokens of its grid, not 4"):
        plain(pictures(), tokens=4)
    with pytest.raises(InputError, match="a prior goes with its SpotViT"):
        plain(pictures(), prior="uniform")
    torch.testing.assert_close(plain(pictures(), plain.place(pictures())), plain(pictures()))
    larger = pictures(size=64)  # timm's patch embedding takes one size, windows take any
    torch.testing.assert_close(plain(larger), plain.model(larger, plain.model.grid(larger)))


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_rope_mixed_224"])
def test_the_plain_vit_of_a_rotary_one_is_timms(name):
    model = spot.adapt(name, depth=2, img_size=112, num_classes=10).eval()
    images = pictures(2, 112)
    torch.testing.assert_close(PlainViT(model)(images), model.vit(images), rtol=1e-4, atol=1e-5)


# PatchDropout


def test_patch_dropout_is_timm_with_the_other_patches_taken_out():
    model = make_nano(reg_tokens=2)
    images, vit = pictures(), model.vit
    dropout = PatchDropout(model, 7)
    assert dropout.forward_features(images).shape[1] == 3 + 7
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


def test_every_patch_is_equally_likely():
    positions = PatchDropout(make_nano(), 4).place(torch.zeros(4000, 3, 32, 32), generator=seed())
    cells = (positions * 4).floor().long()
    counts = torch.bincount((cells[..., 0] * 4 + cells[..., 1]).flatten(), minlength=16)
    # Each is kept in a quarter of 4000 images: 1000 ± 27, here within five standard deviations.
    assert (counts - 1000).abs().max() < 5 * 27.4


# A smaller image


def test_a_smaller_image_is_timms_model_of_that_size():
    model = make_nano()
    with torch.no_grad():
        model.vit.pos_embed.zero_()  # timm resamples the table in its own way
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    small = timm.create_model("vit_tiny_patch16_224", **shape).eval()
    small.load_state_dict({**model.vit.state_dict(), "pos_embed": torch.zeros(1, 5, 32)})
    expected = small(resize(pictures(), [16, 16], interpolation=3, antialias=True))
    torch.testing.assert_close(Resize(model, 4)(pictures()), expected, rtol=1e-4, atol=1e-5)
    positions = torch.tensor([[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]])
    torch.testing.assert_close(Resize(model, 4).place(pictures()), positions.expand(3, -1, -1))
    assert macs(Resize(model, 4)) == macs(model.at(tokens=4))


@pytest.mark.parametrize(
    "tokens, size, grid", [(49, (224, 224), (7, 7)), (24, (240, 160), (6, 4)), (12, (32, 32), (3, 4))]
)
def test_rows_and_columns_follow_the_aspect(tokens, size, grid):
    assert small_grid(tokens, *size) == grid


def test_a_number_without_such_a_grid_is_refused_with_the_nearest():
    model, fitting = make_nano(img_size=64), []
    with pytest.raises(InputError, match="has 10 patches in rows and columns; the nearest number is 9"):
        Resize(model, 10)
    with pytest.raises(InputError, match="has 1 patches in rows and columns; the nearest number is 2"):
        small_grid(1, 240, 160)
    for tokens in range(1, 64):
        try:
            fitting.append(Resize(model, tokens).tokens)
        except InputError:
            continue
    assert shrinkable(model, range(1, 70)) == fitting and {4, 9, 16, 25, 36, 49} <= set(fitting)


# Elastic windows


def test_elastic_windows_begin_and_end_on_whole_pixels_inside_the_image():
    images = torch.zeros(200, 3, 32, 40)
    windows = ElasticViT(make_nano(), 11, shift=5, scale=(0.5, 2.0)).place(images, generator=seed())
    assert windows.shape == (200, 11, 3)
    positions, sides = windows[..., :2], windows[..., 2] * 8
    for axis, length in enumerate((32, 40)):
        start = positions[..., axis] * length - sides / 2
        torch.testing.assert_close(start, start.round(), rtol=0, atol=1e-4)
        assert start.min() > -1e-3
        assert (start + sides).max() < length + 1e-3
    torch.testing.assert_close(sides, sides.round())
    assert sorted(set(sides.flatten().tolist())) == list(range(4, 17))  # every side from 8 · 0.5 to 8 · 2 occurs


def test_elastic_windows_move_by_every_whole_pixel_up_to_the_shift():
    images = torch.zeros(500, 3, 24, 24)  # a grid of 3 × 3, whose middle patch is free to move
    windows = ElasticViT(make_nano(img_size=24), shift=3, scale=(1.0, 1.0)).place(images, generator=seed())
    assert set((windows[:, 4, :2] * 24 - 12).round().flatten().tolist()) == {-3, -2, -1, 0, 1, 2, 3}
    assert set(windows[..., 2].flatten().tolist()) == {1.0}


@pytest.mark.parametrize("options", [{"scale": (2.0, 1.0)}, {"shift": -1}])
def test_elastic_ranges_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match="shift must be at least 0 and scale a rising pair"):
        ElasticViT(make_nano(), **options)
