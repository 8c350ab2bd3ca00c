"""Windows of scale 1: bilinear K × K reads at continuous positions. test_pyramid.py has their definition."""

import pytest
import torch
import torch.nn.functional as F

from spot.errors import InputError
from spot.placement.sizes import sized
from spot.tokens.windows import windows


def grid(rows, columns):
    y, x = torch.meshgrid((torch.arange(rows) + 0.5) / rows, (torch.arange(columns) + 0.5) / columns, indexing="ij")
    return torch.stack([y, x], -1).view(1, -1, 2)


@pytest.mark.parametrize(
    "size, rows, columns", [(16, 14, 14), (14, 37, 37), (32, 12, 12), (8, 28, 28), (16, 9, 21), (7, 3, 11), (1, 5, 6)]
)
def test_on_the_vit_grid_windows_are_the_patches_bit_for_bit(size, rows, columns):
    images = torch.randn(2, 3, rows * size, columns * size)
    patches = F.unfold(images, size, stride=size).transpose(1, 2).unflatten(2, (3, size, size))
    assert torch.equal(windows(images, grid(rows, columns).expand(2, -1, -1), size), patches)


def test_outside_the_image_the_border_is_repeated():
    image = torch.arange(4.0).view(1, 1, 2, 2)
    far = torch.tensor([[[-3.0, -3.0], [9.0, 9.0], [-1e30, 1e30]]])
    assert windows(image, far, 4)[0].flatten(1).unique(dim=1).flatten().tolist() == [0.0, 3.0, 1.0]


@pytest.mark.parametrize("size", [1, 4])
def test_gradients_with_respect_to_images_and_positions(size):
    images = torch.randn(2, 2, 7, 9, dtype=torch.float64, requires_grad=True)
    positions = (torch.rand(2, 3, 2, dtype=torch.float64) * 1.4 - 0.2).requires_grad_()
    assert torch.autograd.gradcheck(lambda i, p: windows(i, p, size), (images, positions))


def test_the_gradient_passes_where_a_position_is_snapped_to_a_pixel():
    ramp = torch.arange(32.0).expand(1, 1, 32, 32)
    positions = grid(2, 2).requires_grad_()
    windows(ramp, positions, 16).sum().backward()
    # Moving a whole window right by one pixel adds 1 to each of its samples, but for the right border.
    per_fraction = positions.grad[0, :, 1] / 32
    assert per_fraction.tolist() == [256.0, 240.0, 256.0, 240.0]


SCALES = pytest.mark.parametrize("scale", [1.0, 1.7])  # without and with a pyramid


@SCALES
def test_bfloat16_images_keep_their_type_and_subpixel_placement(scale):
    images, positions = torch.rand(1, 3, 64, 64), sized(torch.rand(1, 5, 2), scale)
    half = windows(images.bfloat16(), positions, 8)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), windows(images.bfloat16().float(), positions, 8), atol=4e-3, rtol=1e-2)


@SCALES
def test_it_compiles_without_a_graph_break_and_exports(scale):
    torch._dynamo.reset()
    images, positions = torch.randn(2, 3, 20, 20).double(), sized(torch.rand(2, 4, 2).double(), scale)
    compiled = torch.compile(lambda i, p: windows(i, p, 4), fullgraph=True, backend="aot_eager")
    leaf, reference = positions.clone().requires_grad_(), positions.clone().requires_grad_()
    compiled(images, leaf).square().sum().backward()
    windows(images, reference, 4).square().sum().backward()
    torch.testing.assert_close(leaf.grad, reference.grad)

    class Reader(torch.nn.Module):
        def forward(self, images, positions):
            return windows(images, positions, 4)

    program = torch.export.export(Reader(), (images, positions))
    torch.testing.assert_close(program.module()(images, positions), windows(images, positions, 4))


@SCALES
def test_function_transforms_work_through_it(scale):
    images, positions = torch.randn(5, 3, 20, 20).double(), sized(torch.rand(5, 4, 2).double(), scale)

    def energy(image, position):
        return windows(image[None], position[None], 4).square().sum()

    per_image = torch.func.vmap(torch.func.grad(energy, argnums=1))(images, positions)
    leaf = positions.clone().requires_grad_()
    windows(images, leaf, 4).square().sum().backward()
    torch.testing.assert_close(per_image, leaf.grad)


@SCALES
def test_no_images_and_no_tokens_give_no_windows(scale):
    assert windows(torch.empty(0, 3, 8, 8), sized(torch.empty(0, 5, 2), scale), 4).shape == (0, 5, 3, 4, 4)
    assert windows(torch.zeros(2, 3, 8, 8), sized(torch.empty(2, 0, 2), scale), 4).shape == (2, 0, 3, 4, 4)


@pytest.mark.parametrize(
    "images, positions, size, sentence",
    [
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, 2, 2), 4, "floating point"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 2, 1, 1, 2), 4, r"positions\[:, :, 0, 0\]"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(2, 2), 4, "batch dimension"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(3, 2, 2), 4, "3 images, but there are 1"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 2, 2, dtype=torch.float16), 4, "must be float32"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 2, 2, device="meta"), 4, "on meta"),
    ],
)
def test_bad_input_is_named(images, positions, size, sentence):
    with pytest.raises(InputError, match=sentence):
        windows(images, positions, size)
