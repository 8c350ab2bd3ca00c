import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spot
from spot.errors import InputError
from spot.models.mae import MaskedAutoencoder, fill_decoder, hidden_indices
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


def test_hidden_windows_on_the_grid_are_the_normalised_patches_that_are_not_visible(autoencoder):
    reconstructed, hidden = autoencoder(IMAGES, grid(autoencoder), VISIBLE)
    patches = F.unfold(IMAGES, 8, stride=8).transpose(1, 2)  # (2, 16, 192), rows of patches
    patches = (patches - patches.mean(-1, keepdim=True)) / patches.std(-1, keepdim=True)
    torch.testing.assert_close(hidden[0], patches[0, [1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden[1], patches[1, 4:], atol=1e-4, rtol=1e-4)
    assert reconstructed.shape == hidden.shape == (2, 12, 192)


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
    again = hidden_indices(order.argsort()[VISIBLE], 16)
    for image in range(2):
        rows = [hidden_indices(VISIBLE, 16)[image].tolist().index(int(order[number])) for number in again[image]]
        torch.testing.assert_close(shuffled.reconstructed[image], reconstructed[image, rows], atol=1e-5, rtol=1e-4)


def test_gradients_reach_encoder_and_decoder(autoencoder):
    reconstructed, hidden = autoencoder(IMAGES, grid(autoencoder), VISIBLE)
    (reconstructed - hidden).square().mean().backward()
    idle = [name for name, parameter in autoencoder.named_parameters() if parameter.grad is None]
    assert idle == ["encoder.vit.head.weight", "encoder.vit.head.bias"]


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(InputError, match="multiple of heads"):
        MaskedAutoencoder(make_nano(), width=30, heads=4)


# Published checkpoints: a file of their layout, and their arithmetic written out from the paper (He et al., 2022)

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
DECODER = {"width": 24, "depth": 3, "heads": 2}


def block_state(prefix: str, width: int) -> dict:
    sizes = {
        "norm1": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width),
        "norm2": (width,), "mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width),
    }  # fmt: skip
    state = {f"{prefix}.{name}.weight": torch.randn(size) * 0.2 for name, size in sizes.items()}
    return state | {f"{prefix}.{name}.bias": torch.randn(size[:1]) * 0.2 for name, size in sizes.items()}


def published(*, decoder: bool = True, classes: int = 0) -> dict:
    """Weights by the names of `mae_pretrain_vit_base_full.pth`, or of `mae_finetune_vit_base.pth`, of a nano ViT."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = {"cls_token": torch.randn(1, 1, 32), "pos_embed": torch.randn(1, 17, 32)}
        state |= {"patch_embed.proj.weight": torch.randn(32, 3, 8, 8) * 0.1, "patch_embed.proj.bias": torch.randn(32)}
        for number in range(2):
            state |= block_state(f"blocks.{number}", 32)
        norm = "fc_norm" if classes else "norm"
        state |= {f"{norm}.weight": torch.rand(32) + 0.5, f"{norm}.bias": torch.randn(32)}
        if classes:
            state |= {"head.weight": torch.randn(classes, 32), "head.bias": torch.randn(classes)}
        if decoder:
            state |= {"mask_token": torch.randn(1, 1, 24), "decoder_pos_embed": torch.randn(1, 17, 24)}
            state["decoder_pos_embed"][:, 0] = 0  # sines and cosines of places, and nothing for the class token
            state |= {"decoder_embed.weight": torch.randn(24, 32) * 0.2, "decoder_embed.bias": torch.randn(24)}
            for number in range(3):
                state |= block_state(f"decoder_blocks.{number}", 24)
            state |= {"decoder_norm.weight": torch.rand(24) + 0.5, "decoder_norm.bias": torch.randn(24)}
            state |= {"decoder_pred.weight": torch.randn(192, 24) * 0.2, "decoder_pred.bias": torch.randn(192)}
    return state


@pytest.fixture
def full(tmp_path):
    """A pickle as published: the weights under "model"."""
    torch.save({"model": published()}, tmp_path / "mae_full.pth")
    return tmp_path / "mae_full.pth"


def norm(state, name, x):
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)


def linear(state, name, x):
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def blocks(state, prefix, x, heads=2):
    number = 0
    while f"{prefix}.{number}.norm1.weight" in state:
        name = f"{prefix}.{number}"
        q, k, v = linear(state, f"{name}.attn.qkv", norm(state, f"{name}.norm1", x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + linear(state, f"{name}.attn.proj", (attention @ v).transpose(1, 2).flatten(2))
        hidden = F.gelu(linear(state, f"{name}.mlp.fc1", norm(state, f"{name}.norm2", x)))
        x = x + linear(state, f"{name}.mlp.fc2", hidden)
        number += 1
    return x


def patches_pixel_by_pixel(images):
    """(B, 16, 8 · 8 · 3): a patch's rows, then its columns, and the three channels of each pixel together."""
    return images.unflatten(3, (4, 8)).unflatten(2, (4, 8)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def their_loss(state, images, visible):
    """The loss of the published autoencoder, with normalised pixels, on patches that are not visible."""
    proj = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=8)
    x = proj.flatten(2).transpose(1, 2) + state["pos_embed"][:, 1:]
    x = torch.cat([(state["cls_token"] + state["pos_embed"][:, :1]).expand(2, -1, -1),
                   x.take_along_dim(visible[..., None], 1)], 1)  # fmt: skip
    known = linear(state, "decoder_embed", norm(state, "norm", blocks(state, "blocks", x)))
    tokens = state["mask_token"].repeat(2, 16, 1)
    for image in range(2):
        for place, number in enumerate(visible[image].tolist()):
            tokens[image, number] = known[image, 1 + place]
    y = torch.cat([known[:, :1], tokens], 1) + state["decoder_pos_embed"]
    y = linear(state, "decoder_pred", norm(state, "decoder_norm", blocks(state, "decoder_blocks", y)))[:, 1:]
    target = patches_pixel_by_pixel(images)
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5
    errors = (y - target).square().mean(-1)
    mask = torch.ones(2, 16).scatter(1, visible, 0.0)
    return (errors * mask).sum() / mask.sum()


def test_a_published_autoencoder_on_its_grid_has_the_loss_that_its_own_arithmetic_gives(full):
    encoder = spot.load("vit_tiny_patch16_224", weights=full, num_classes=0, **SHAPE)
    autoencoder = MaskedAutoencoder(encoder, **DECODER).eval()
    fill_decoder(autoencoder.decoder, published())
    with torch.no_grad():
        reconstructed, hidden = autoencoder(IMAGES, grid(autoencoder), VISIBLE)
    torch.testing.assert_close((reconstructed - hidden).square().mean(), their_loss(published(), IMAGES, VISIBLE))


def test_a_decoder_for_a_finer_grid_gives_the_published_vectors_at_the_published_places():
    larger = MaskedAutoencoder(make_nano(img_size=64), **DECODER).decoder
    fill_decoder(larger, published())
    places = make_nano().grid()
    torch.testing.assert_close(larger.positions(places), published()["decoder_pos_embed"][0, 1:], atol=1e-4, rtol=1e-4)


def test_a_decoder_of_another_size_is_refused_with_the_files_size():
    with pytest.raises(InputError, match=r"24 wide and 3 blocks deep"):
        fill_decoder(MaskedAutoencoder(make_nano(), width=24, depth=2, heads=2).decoder, published(), "the file")
    with pytest.raises(InputError, match="no decoder_pos_embed"):
        fill_decoder(MaskedAutoencoder(make_nano(), **DECODER).decoder, published(decoder=False))
    odd = published()
    odd["decoder_pos_embed"] = odd["decoder_pos_embed"] + 1
    with pytest.raises(InputError, match="gives the class token a position"):
        fill_decoder(MaskedAutoencoder(make_nano(), **DECODER).decoder, odd)


def test_a_fine_tuned_file_says_itself_that_the_mean_is_pooled_and_how_many_classes_there_are(tmp_path):
    state = published(decoder=False, classes=7)
    torch.save({"model": state}, tmp_path / "finetuned.pth")
    model = spot.load("vit_tiny_patch16_224", weights=tmp_path / "finetuned.pth", **SHAPE)
    assert (model.vit.global_pool, model.num_classes) == ("avg", 7)
    images = IMAGES
    proj = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=8)
    x = proj.flatten(2).transpose(1, 2) + state["pos_embed"][:, 1:]
    x = blocks(state, "blocks", torch.cat([(state["cls_token"] + state["pos_embed"][:, :1]).expand(2, -1, -1), x], 1))
    logits = linear(state, "head", norm(state, "fc_norm", x[:, 1:].mean(1)))
    with torch.no_grad():
        torch.testing.assert_close(model(images), logits, atol=1e-4, rtol=1e-4)
    other = spot.load("vit_tiny_patch16_224", weights=tmp_path / "finetuned.pth", num_classes=3, **SHAPE)
    assert other.num_classes == 3 and isinstance(other.vit.fc_norm, nn.LayerNorm)
