"""The exported module computes what the model computes."""

import pytest
import torch

import spot
from spot.export.flat import flat_windows, pyramid_windows, scaled_flat_windows
from spot.export.graph import Graph
from spot.models.tome import Merging, ToMe
from spot.models.wrappers import PlainViT
from tests.conftest import make_nano

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
FAMILIES = (
    ("vit_tiny_patch16_224", {}),
    ("vit_tiny_patch16_224", {"qk_norm": True}),
    ("deit_tiny_distilled_patch16_224", {}),
    ("deit3_small_patch16_224", {"init_values": 0.3}),
    ("vit_small_patch16_dinov3", {}),
    ("vit_medium_patch16_reg4_gap_256", {}),
    ("eva02_tiny_patch14_224", {}),
    ("vit_small_patch16_rope_mixed_224", {}),
)


def random_model(name, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = spot.adapt(name, **{**SMALL, **options}).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def bytes_and_positions(batch=2, size=(32, 32), tokens=7):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (batch, *size, 3), generator=generator, dtype=torch.uint8)
    return pixels, 1.2 * torch.rand(batch, tokens, 2, generator=generator) - 0.1


def normalised(model, pixels):
    mean, std = torch.tensor(model.data_config["mean"]), torch.tensor(model.data_config["std"])
    return ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2)


@pytest.mark.parametrize("name, options", FAMILIES)
@torch.no_grad()
def test_every_family_of_vits_gives_its_own_logits_and_features_from_bytes(name, options):
    model = random_model(name, **options)
    pixels, positions = bytes_and_positions(size=(32, 40))
    outputs = ("logits", "pooled", "tokens")
    logits, pooled, tokens = Graph(model, outputs=outputs)(pixels, positions)
    images = normalised(model, pixels)
    features = model.forward_features(images, positions)
    torch.testing.assert_close(logits, model(images, positions), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pooled, model.forward_head(features, pre_logits=True), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tokens, features, atol=1e-4, rtol=1e-4)


def with_sizes(positions, largest=4.0):
    """Positions (B, N, 2) with scales between a half and the largest."""
    scales = 0.5 * (2 * largest) ** torch.rand(*positions.shape[:2], 1, generator=torch.Generator().manual_seed(1))
    return torch.cat([positions, scales], -1)


@pytest.mark.parametrize("largest", [None, 1.0, 2.0, 4.0])  # None: no sizes; 2 needs no pyramid, 4 does
@pytest.mark.parametrize("size", [(31, 45), (64, 32)])
def test_gathered_windows_are_the_library_s_windows(size, largest):
    pixels, placed = bytes_and_positions(batch=3, size=size, tokens=11)
    if largest is None:
        gathered = flat_windows(pixels, placed, 8)
    else:
        placed = with_sizes(placed, largest)
        gathered = scaled_flat_windows(pixels, placed, 8, 4)
    expected = spot.windows(pixels.permute(0, 3, 1, 2).float(), placed, 8)
    torch.testing.assert_close(gathered, expected, atol=1e-3 if largest is None else 2e-3, rtol=0)


@pytest.mark.parametrize("largest", [0.7, 1.0, 1.3, 2.0])
def test_squares_are_large_enough_for_the_largest_scale_alone(largest):
    pixels, positions = bytes_and_positions(batch=3, size=(31, 45), tokens=60)
    placed = torch.cat([positions, torch.full((3, 60, 1), largest)], -1)
    expected = spot.windows(pixels.permute(0, 3, 1, 2).float(), placed, 8)
    levels = 1 + (largest > 1)
    torch.testing.assert_close(pyramid_windows(pixels, placed, 8, levels, largest), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("pool", ["token", "avg"])
@torch.no_grad()
def test_merging_without_sorting_is_what_tome_merges(pool):
    model = random_model("vit_tiny_patch16_224", depth=12, img_size=64, global_pool=pool, class_token=pool == "token")
    pixels, _ = bytes_and_positions(batch=3, size=(64, 64))
    images = normalised(model, pixels)
    merging = Merging(model, 25)
    assert sum(merging.schedule()) > 8
    (logits,) = Graph(merging)(pixels)
    torch.testing.assert_close(logits, merging(images), atol=2e-5, rtol=1e-4)
    dense = ToMe(model, [0, 3, 0, 5, *[0] * 8])
    (logits,) = Graph(dense)(pixels)
    torch.testing.assert_close(logits, dense(images), atol=2e-5, rtol=1e-4)


def test_on_the_grid_gathered_windows_are_the_patches_bit_for_bit():
    model = make_nano()
    pixels, _ = bytes_and_positions()
    images = pixels.permute(0, 3, 1, 2)
    grid = model.grid().reshape(-1, 2).expand(2, -1, -1)
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
    assert torch.equal(flat_windows(pixels, grid, 8), patches.float())
    of_one = torch.cat([grid, torch.ones_like(grid[..., :1])], -1)
    assert torch.equal(scaled_flat_windows(pixels, of_one, 8, 3), patches.float())


@torch.no_grad()
def test_the_plain_vit_to_compare_with_is_timm_s():
    model = make_nano()
    pixels, _ = bytes_and_positions()
    (logits,) = Graph(PlainViT(model))(pixels)
    torch.testing.assert_close(logits, model.vit(normalised(model, pixels)), atol=1e-5, rtol=1e-5)


def test_the_model_is_left_as_it_was():
    model = make_nano()
    before = model.tokenizer
    Graph(model)
    assert model.tokenizer is before
