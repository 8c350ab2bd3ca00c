"""Elastic windows: whole pixels, random sides, random drops."""

import pytest
import torch
from torch.nn import functional as F

from spot.errors import InputError
from spot.models.elastic import ElasticViT, perturb
from tests.conftest import make_nano


def pictures(batch: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_without_perturbation_it_is_the_plain_vit():
    model = make_nano()
    still = ElasticViT(model, shift=0, scale=(1.0, 1.0))
    torch.testing.assert_close(still(pictures()), model.vit(pictures()), rtol=1e-4, atol=1e-5)


def test_windows_begin_and_end_on_whole_pixels_inside_the_image():
    images = torch.zeros(200, 3, 32, 40)
    model = make_nano()
    windows = ElasticViT(model, 11, shift=5, scale=(0.5, 2.0)).place(images, generator=seed())
    assert windows.shape == (200, 11, 3)
    positions, sides = windows[..., :2], windows[..., 2] * 8
    for axis, length in enumerate((32, 40)):
        start = positions[..., axis] * length - sides / 2
        torch.testing.assert_close(start, start.round(), rtol=0, atol=1e-4)
        assert start.min() > -1e-3
        assert (start + sides).max() < length + 1e-3
    torch.testing.assert_close(sides, sides.round())
    assert sorted(set(sides.flatten().tolist())) == list(range(4, 17))  # every side from 8 · 0.5 to 8 · 2 occurs


def test_windows_move_by_every_whole_pixel_up_to_the_shift():
    images, middle = torch.zeros(500, 3, 32, 32), torch.full((500, 1, 2), 0.5)
    windows = perturb(images, middle, seed(), size=8, shift=3)
    assert set((windows[..., :2] * 32 - 16).flatten().tolist()) == {-3, -2, -1, 0, 1, 2, 3}
    assert set(windows[..., 2].flatten().tolist()) == {1.0}


def test_a_window_of_twice_the_side_is_the_patch_of_the_image_at_half_the_size():
    """With one elastic window over a smooth 16 × 16 image, bilinear sampling every 2 pixels is its 8 × 8 version."""
    model = make_nano(img_size=16)
    ramp = torch.linspace(-1, 1, 16).expand(1, 3, 16, 16)  # linear, so no detail is lost or aliased
    large = ElasticViT(model, 1, shift=0, scale=(2.0, 2.0))
    windows = large.place(ramp, generator=seed())
    positions = windows[..., :2]
    torch.testing.assert_close(positions, torch.full((1, 1, 2), 0.5))
    half = F.interpolate(ramp, (8, 8), mode="bilinear", align_corners=False)
    tokens, _ = model.embed(ramp, windows)
    weight, bias = model.vit.patch_embed.proj.weight.flatten(1), model.vit.patch_embed.proj.bias
    position = model.tokenizer.kernels(positions) @ model.vit.pos_embed[0, 1:]
    torch.testing.assert_close(tokens[:, 1], half.flatten(1) @ weight.T + bias + position[:, 0])


def test_patches_are_dropped_without_replacement():
    model = make_nano()
    positions = ElasticViT(model, 9, shift=0, scale=(1.0, 1.0)).place(pictures(40), generator=seed())
    for placement in positions.tolist():
        assert len({tuple(position) for position in placement}) == 9


def test_it_perturbs_while_training_and_repeats_with_a_seed():
    model = ElasticViT(make_nano(), 6).train()
    first, second = model(pictures(), generator=seed(1)), model(pictures(), generator=seed(2))
    assert not torch.allclose(first, second)
    torch.testing.assert_close(model(pictures(), generator=seed(1)), first)
    first.sum().backward()
    assert model.model.vit.patch_embed.proj.weight.grad.abs().sum() > 0


def test_an_image_s_windows_do_not_depend_on_the_batch():
    model, images, generator = ElasticViT(make_nano(), 6), pictures(5), seed()
    parts = [model.place(images[:2], generator=generator), model.place(images[2:], generator=generator)]
    assert torch.equal(model.place(images, generator=seed()), torch.cat(parts))


def test_the_caller_may_give_windows_or_positions_of_scale_one():
    model, positions = make_nano(), torch.rand(3, 4, 2)
    elastic = ElasticViT(model)
    torch.testing.assert_close(elastic(pictures(), positions), model(pictures(), positions))
    windows = elastic.place(pictures(), generator=seed())
    torch.testing.assert_close(elastic(pictures(), windows), elastic(pictures(), generator=seed()))


def test_what_elastic_windows_cannot_do_is_refused():
    with pytest.raises(InputError, match="at most the 16 patches"):
        ElasticViT(make_nano(), 17)
    with pytest.raises(InputError, match="rising pair"):
        ElasticViT(make_nano(), scale=(2.0, 1.0))(pictures())
    with pytest.raises(InputError, match="at least 0"):
        ElasticViT(make_nano(), shift=-1)(pictures())
    with pytest.raises(InputError, match="4 patches"):
        perturb(pictures(1), torch.rand(1, 4, 2), size=8, tokens=5)
