import pytest
import torch
from torch.nn import functional as F

from spot.errors import InputError
from spot.models.mae import MaskedAutoencoder, hidden_of
from tests.conftest import make_nano

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VISIBLE = torch.tensor([[0, 5, 10, 15], [3, 2, 1, 0]])


@pytest.fixture
def autoencoder():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MaskedAutoencoder(make_nano(), width=32, depth=2, heads=2).eval()


def grid(autoencoder):
    return autoencoder.encoder.grid().expand(2, -1, -1)


def test_the_decoder_is_512_wide_and_8_blocks_deep_unless_asked():
    decoder = MaskedAutoencoder(make_nano()).decoder
    assert decoder.narrow.out_features == 512
    assert len(decoder.blocks) == 8
    assert decoder.pixels.out_features == 3 * 8 * 8


def test_hidden_windows_on_the_grid_are_the_patches_that_are_not_visible(autoencoder):
    reconstructed, hidden = autoencoder(IMAGES, grid(autoencoder), VISIBLE, normalize=False)
    patches = F.unfold(IMAGES, 8, stride=8).transpose(1, 2)  # (2, 16, 192), rows of patches
    torch.testing.assert_close(hidden[0], patches[0, [1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14]])
    torch.testing.assert_close(hidden[1], patches[1, 4:])
    assert reconstructed.shape == hidden.shape == (2, 12, 192)


def test_normalised_windows_have_mean_0_and_variance_1(autoencoder):
    hidden = autoencoder(IMAGES, grid(autoencoder), VISIBLE).hidden
    torch.testing.assert_close(hidden.mean(-1), torch.zeros(2, 12), atol=1e-5, rtol=0)
    torch.testing.assert_close(hidden.var(-1), torch.ones(2, 12), atol=1e-4, rtol=0)


def test_what_is_hidden_does_not_reach_the_painter(autoencoder):
    reconstructed = autoencoder(IMAGES, grid(autoencoder), VISIBLE).reconstructed
    changed = IMAGES.clone()
    changed[1, :, 8:] = 0  # the second image shows its upper row of patches only
    torch.testing.assert_close(autoencoder(changed, grid(autoencoder), VISIBLE).reconstructed[1], reconstructed[1])
    changed[1, :, :8] = 0
    assert not torch.allclose(
        autoencoder(changed, grid(autoencoder), VISIBLE).reconstructed[1], reconstructed[1], atol=1e-3
    )


def test_the_painter_knows_where_each_window_is_and_not_in_which_order(autoencoder):
    positions = torch.rand(2, 16, 2, generator=torch.Generator().manual_seed(1))
    reconstructed = autoencoder(IMAGES, positions, VISIBLE).reconstructed
    moved = positions.clone()
    moved[0, 1] += 0.1  # a hidden window of the first image
    assert not torch.allclose(autoencoder(IMAGES, moved, VISIBLE).reconstructed[0, 0], reconstructed[0, 0], atol=1e-4)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    shuffled = autoencoder(IMAGES, positions[:, order], order.argsort()[VISIBLE])
    again = hidden_of(order.argsort()[VISIBLE], 16)
    for image in range(2):
        rows = [hidden_of(VISIBLE, 16)[image].tolist().index(int(order[number])) for number in again[image]]
        torch.testing.assert_close(shuffled.reconstructed[image], reconstructed[image, rows], atol=1e-5, rtol=1e-4)


def test_gradients_reach_encoder_and_decoder(autoencoder):
    reconstructed, hidden = autoencoder(IMAGES, grid(autoencoder), VISIBLE)
    (reconstructed - hidden).square().mean().backward()
    idle = [name for name, parameter in autoencoder.named_parameters() if parameter.grad is None]
    assert idle == ["encoder.vit.head.weight", "encoder.vit.head.bias"]


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(InputError, match="multiple of heads"):
        MaskedAutoencoder(make_nano(), width=30, heads=4)
