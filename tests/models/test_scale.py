"""Models whose windows have a scale."""

import pytest
import timm
import torch
import torch.nn.functional as F

import spot
from spot.errors import InputError
from spot.hashes import hash_model
from tests.conftest import make_nano


def with_scale(positions, scale):
    return torch.cat([positions, torch.full_like(positions[..., :1], scale)], -1)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_mixed_224", "eva02_tiny_patch14_224"])
@torch.no_grad()
def test_with_scale_one_nothing_changes(name):
    model = spot.adapt(name, depth=1).eval()
    images = torch.randn(1, 3, *model.img_size)
    positions = torch.rand(1, 9, 2)
    assert torch.equal(model(images, with_scale(positions, 1.0)), model(images, positions))
    assert model(images, with_scale(positions, 1.7)).isfinite().all()


@torch.no_grad()
def test_on_the_grid_of_half_the_size_it_is_timms_model_of_that_size_as_far_as_position_tables_allow(vit_tiny):
    """Windows of scale 2 tiling an image are the patches of the image at half size; tables are interpolated."""
    small = timm.create_model(vit_tiny.name.split(".")[0], img_size=112).eval()
    state = dict(vit_tiny.vit.state_dict())
    state["pos_embed"] = timm.layers.resample_abs_pos_embed(state["pos_embed"], [7, 7])
    small.load_state_dict(state)
    noise = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    images = F.interpolate(noise, (224, 224), mode="bicubic")
    cells = (torch.arange(7) + 0.5) / 7
    grid = torch.stack(torch.meshgrid(cells, cells, indexing="ij"), -1).view(1, -1, 2).expand(4, -1, -1)
    ours = vit_tiny.embed(images, with_scale(grid, 2.0))[0]
    theirs = small._pos_embed(small.patch_embed(F.avg_pool2d(images, 2)))
    table = vit_tiny.tokenizer.kernels(grid[0]) @ vit_tiny.vit.pos_embed[0, 1:] - state["pos_embed"][0, 1:]
    torch.testing.assert_close(ours[:, 1:] - table, theirs[:, 1:], atol=1e-4, rtol=1e-4)  # all but the tables
    assert table.norm() < 0.35 * state["pos_embed"][0, 1:].norm()
    assert F.cosine_similarity(vit_tiny(images, with_scale(grid, 2.0)), small(F.avg_pool2d(images, 2))).min() > 0.95


@pytest.mark.parametrize("scale", [1.0, 0.7, 1.5, 2.0, "auto"])
@pytest.mark.parametrize("batch", [1, 3])
def test_without_gradients_a_repeated_placement_predicts_the_same(scale, batch):
    """Without gradients, values that depend only on positions are cached; with gradients they are not."""
    model, images = make_nano().at(prior="center", tokens=13, scale=scale), torch.randn(batch, 3, 64, 64)
    for pixels in (images, images[..., :39, :57]):
        expected = model(pixels)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            model(pixels)
        with torch.no_grad():
            model.place(pixels).fill_(0.5)  # the caller's own copy
            assert torch.equal(model(pixels), expected)
            with pytest.raises(InputError, match="use a scale of at most"):
                model(pixels, scale=9.0)


def test_a_models_scale_is_saved_with_it_and_part_of_its_hash(tmp_path):
    model = make_nano()
    plain = hash_model(model)
    model.scale = "auto"
    model.save_pretrained(tmp_path / "model")
    assert spot.load(tmp_path / "model").scale == "auto"
    assert spot.load(tmp_path / "model", scale=1.3).scale == 1.3
    assert spot.load(tmp_path / "model", num_classes=3).scale == "auto"  # also under other options of timm's
    assert hash_model(model) != plain
    model.scale = None
    assert hash_model(model) == plain


def test_the_authors_checkpoints_read_windows_of_one_size():
    from spot.tokens.authors import AuthorsTokenizer

    vit = make_nano().vit
    model = spot.SpotViT(vit, tokenizer=AuthorsTokenizer(8, 32))
    with pytest.raises(InputError, match="windows of one size"):
        model.scale = 2.0
    with pytest.raises(InputError, match="windows of one size"):
        model(torch.zeros(1, 3, 32, 32), torch.full((1, 2, 3), 0.5))
