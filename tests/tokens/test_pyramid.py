"""Windows of any scale: samples from a pyramid of the image."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from spot.errors import InputError
from spot.tokens.windows import windows
from tests.tokens.test_windows import grid


def slow_windows(images, positions, size, scale=1.0, level=0, full=None):
    """Sample by sample, from the definition: bilinear between pixel centres, border repeated.

    The image may be a level of a pyramid: then one of its pixels is 2**level of the first image's.
    """
    batch, channels, height, width = images.shape
    full = full or (height, width)  # of the image that positions are fractions of
    result = torch.zeros(batch, positions.shape[1], channels, size, size, dtype=images.dtype)

    def pixel(b, y, x):
        return images[b, :, min(max(y, 0), height - 1), min(max(x, 0), width - 1)]

    for b in range(batch):
        for n in range(positions.shape[1]):
            for i in range(size):
                for j in range(size):
                    y = float(positions[b, n, 0]) * full[0] / 2**level - 0.5 + (i - (size - 1) / 2) * scale / 2**level
                    x = float(positions[b, n, 1]) * full[1] / 2**level - 0.5 + (j - (size - 1) / 2) * scale / 2**level
                    y0, x0 = math.floor(y), math.floor(x)
                    fy, fx = y - y0, x - x0
                    upper = (1 - fx) * pixel(b, y0, x0) + fx * pixel(b, y0, x0 + 1)
                    lower = (1 - fx) * pixel(b, y0 + 1, x0) + fx * pixel(b, y0 + 1, x0 + 1)
                    result[b, n, :, i, j] = (1 - fy) * upper + fy * lower
    return result


def slow_scaled(images, positions, size, scale):
    """From the definition: two levels by explicit means of 2 × 2 pixels, each read sample by sample, and mixed."""
    full, level = images.shape[-2:], 0
    while scale >= 2 ** (level + 1):
        images, level = slow_half(images), level + 1
    share = max(0.0, math.log2(scale) - level) ** 2
    lower = slow_windows(images, positions, size, scale, level, full)
    return lower + share * (slow_windows(slow_half(images), positions, size, scale, level + 1, full) - lower)


def slow_half(images):
    height, width = images.shape[-2:]
    result = images.new_zeros(*images.shape[:2], math.ceil(height / 2), math.ceil(width / 2))
    for y in range(result.shape[-2]):
        for x in range(result.shape[-1]):
            four = [
                images[..., min(2 * y + i, height - 1), min(2 * x + j, width - 1)] for i in range(2) for j in range(2)
            ]
            result[..., y, x] = sum(four) / 4
    return result


def with_scale(positions, scale):
    return torch.cat([positions, torch.as_tensor(scale, dtype=positions.dtype).expand(*positions.shape[:2], 1)], -1)


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 6),
    height=st.integers(1, 14),
    width=st.integers(1, 14),
    scale=st.sampled_from([1.0, 2.0, 4.0]) | st.floats(0.4, 14.0),
    wide=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_windows_of_any_scale_match_the_definition_in_and_around_any_image(size, height, width, scale, wide, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 2, height, width, generator=generator, dtype=torch.float64)
    positions = torch.rand(2, 3, 2, generator=generator, dtype=torch.float64) * 2 - 0.5
    scale = min(scale, max(1.0, max(height, width) / size))
    expected = slow_scaled(images, positions, size, scale)
    leaf = images.clone().requires_grad_(wide)  # images with gradients are read by another path
    torch.testing.assert_close(windows(leaf, with_scale(positions, scale), size), expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("side", [160, 128, 112, 96, 80, 48, 32])
def test_windows_that_tile_an_image_are_near_the_patches_of_its_antialiased_resize(side):
    # Noise with the spectrum of natural images: amplitude falls as 1 / frequency. Mean 0, deviation 1.
    frequency = torch.fft.fftfreq(224)
    radius = (frequency[:, None] ** 2 + frequency**2).sqrt().clamp(min=1 / 224)
    noise = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    image = torch.fft.ifft2(torch.fft.fft2(noise) / radius).real
    image = (image - image.mean()) / image.std()

    careful, careless = (
        F.unfold(F.interpolate(image, (side, side), mode="bicubic", antialias=antialias), 16, stride=16)
        for antialias in (True, False)
    )
    seen = windows(image, with_scale(grid(side // 16, side // 16), 224 / side), 16).flatten(2).mT
    error, aliased = ((each - careful).square().mean().sqrt() for each in (seen, careless))
    assert error < 0.15  # of the image's standard deviation
    assert error < 0.65 * aliased


@pytest.mark.parametrize("height, width, size", [(224, 224, 16), (96, 64, 8), (33, 47, 4)])
def test_scale_one_is_bit_for_bit_the_window_without_a_scale(height, width, size):
    images, positions = torch.randn(2, 3, height, width), torch.rand(2, 9, 2) * 1.2 - 0.1
    assert torch.equal(windows(images, with_scale(positions, 1.0), size), windows(images, positions, size))


def test_windows_of_scale_two_tiling_an_image_are_the_patches_of_the_image_at_half_size():
    images = torch.randn(2, 3, 224, 224)
    patches = F.unfold(F.avg_pool2d(images, 2), 16, stride=16).mT.unflatten(2, (3, 16, 16))
    positions = with_scale(grid(7, 7).expand(2, -1, -1), 2.0)
    torch.testing.assert_close(windows(images, positions, 16), patches, atol=1e-6, rtol=1e-6)


def test_each_token_has_its_own_scale_wherever_it_stands_in_the_batch():
    images, positions = torch.randn(2, 3, 64, 64), torch.rand(2, 5, 2)
    scale = torch.tensor([[1.0, 1.3, 2.0, 3.9, 8.0], [0.5, 7.9, 4.0, 1.0, 2.6]])
    together = windows(images, torch.cat([positions, scale[..., None]], -1), 8)
    for b in range(2):
        for n in range(5):
            alone = windows(images[b : b + 1], with_scale(positions[b : b + 1, n : n + 1], scale[b, n]), 8)
            torch.testing.assert_close(together[b, n], alone[0, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_gradients_with_respect_to_images_positions_and_scale(size):
    images = torch.randn(2, 2, 9, 11, dtype=torch.float64, requires_grad=True)
    positions = torch.rand(2, 4, 2, dtype=torch.float64) * 1.4 - 0.2
    scale = torch.tensor([[0.6, 1.2, 1.9, 2.3], [2.6, 1.1, 0.8, 1.5]], dtype=torch.float64)[..., None]
    sized = torch.cat([positions, scale], -1).requires_grad_()
    assert torch.autograd.gradcheck(lambda i, p: windows(i, p, size), (images, sized))
    assert torch.autograd.gradcheck(lambda p: windows(images.detach(), p, size), (sized,))


def test_the_gradient_to_scale_begins_at_scale_one():
    ramp = torch.arange(32.0).expand(1, 1, 32, 32)
    sized = torch.tensor([[[0.5, 0.5, 1.0]]], requires_grad=True)
    windows(ramp, sized, 4)[0, 0, 0, 0].backward(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    # The last sample stands 1.5 spacings right of the centre, so it moves 1.5 pixels per unit of scale.
    assert sized.grad[0, 0, 2].item() == pytest.approx(1.5, abs=1e-4)
    assert sized.grad[0, 0, 1].item() == pytest.approx(32, abs=1e-3)


@pytest.mark.parametrize(
    "scale, sentence",
    [
        (0.0, "above 0, got 0"),
        (-1.0, "above 0, got -1"),
        (math.nan, "above 0, got nan"),
        (math.inf, "above 0, got inf"),
        (2.1, "2.1 is 16.8 pixels wide, more than the image of 16 × 12; use a scale of at most 2"),
    ],
)
def test_a_scale_that_is_no_size_is_named(scale, sentence):
    with pytest.raises(InputError, match=sentence):
        windows(torch.zeros(1, 3, 16, 12), torch.tensor([[[0.5, 0.5, 1.0], [0.5, 0.5, scale]]]), 8)
