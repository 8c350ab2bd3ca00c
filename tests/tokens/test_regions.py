"""Regions: tokens on the grid of a region are the timm ViT on that region cut out and resized."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import spot
from spot.errors import InputError
from spot.placement.glimpses import Glimpsing, glimpse_positions
from spot.placement.oracle import PRESETS
from spot.tokens.position_embedding import grid_positions

NANO = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, "img_size": 32}


def nano(name: str = "vit_tiny_patch16_224", **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    vit = timm.create_model(name, **{**NANO, **options})
    if getattr(vit, "pos_embed", None) is not None:
        torch.nn.init.normal_(vit.pos_embed)
    return vit.eval()


@pytest.fixture
def street() -> Tensor:
    return torch.randn(2, 3, 90, 130, generator=torch.Generator().manual_seed(1))


def on_region(images: Tensor, top: int, left: int, side: int, cells: int = 4, window: int = 8) -> Tensor:
    """The grid of a square region in pixels, worked out by hand: (B, cells², 7)."""
    height, width = images.shape[-2:]
    rows = []
    for row in range(cells):
        for column in range(cells):
            y, x = top + (row + 0.5) * side / cells, left + (column + 0.5) * side / cells
            region = [(top + side / 2) / height, (left + side / 2) / width, side / height, side / width]
            rows.append([y / height, x / width, side / cells / window, *region])
    return torch.tensor([rows] * len(images))


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch16_rope_224",
        "vit_small_patch16_rope_mixed_224",
        "vit_small_patch16_dinov3",
    ],
)
def test_the_grid_of_a_region_is_timm_on_that_region_cut_out_and_enlarged(name, street):
    vit = nano(name)
    model = spot.adapt(vit)
    wanted = vit(street[:, :, 10:42, 50:82])
    torch.testing.assert_close(model(street, on_region(street, 10, 50, 32)), wanted, atol=2e-5, rtol=1e-4)
    # Samples within half a pixel of the region's edge see beyond it; a resized cut-out repeats its border there. Where
    # the picture ends with the region both do the same.
    picture = street[:, :, :16, :16].contiguous()
    wanted = vit(F.interpolate(picture, (32, 32), mode="bilinear", align_corners=False))
    torch.testing.assert_close(model(picture, on_region(picture, 0, 0, 16)), wanted, atol=2e-5, rtol=1e-4)


def test_a_glimpse_is_the_grid_of_its_region(street):
    glimpses = torch.tensor([[[26 / 90, 66 / 130, 32.0]]] * 2)
    torch.testing.assert_close(glimpse_positions(street, glimpses, 16, 8), on_region(street, 10, 50, 32))


def test_two_glimpses_share_the_tokens(street):
    glimpses = torch.tensor([[[0.3, 0.3, 16.0], [0.6, 0.7, 24.0]]] * 2)
    positions = glimpse_positions(street, glimpses, 17, 8)
    assert positions.shape == (2, 17, 7)
    sides = positions[0, :, 5] * 90
    assert torch.equal(sides.round(), torch.tensor([16.0] * 9 + [24.0] * 8))


def test_gradients_reach_the_place_and_size_of_a_glimpse():
    torch.manual_seed(0)
    model = spot.adapt(nano()).double()
    images = torch.randn(1, 3, 40, 48, dtype=torch.float64)
    glimpses = torch.tensor([[[0.43, 0.52, 13.3]]], dtype=torch.float64, requires_grad=True)
    # The step is small, because bilinear samples have kinks at pixels' centres; kernels are float32.
    see = Glimpsing(model, 9)
    assert torch.autograd.gradcheck(lambda each: see(images, each)[:, 0], glimpses, eps=1e-5, atol=0.02, rtol=0.02)


def test_a_search_moves_and_resizes_a_glimpse_until_the_label_is_more_probable(street):
    model = spot.adapt(nano())
    start = torch.tensor([[[0.4, 0.5, 20.0]]] * 2)
    found = spot.search(Glimpsing(model, 9), street, torch.tensor([1, 3]), start, PRESETS["paper-long"])
    assert (found.losses.amin(1) < found.losses[:, 0]).all()
    assert (found.best[..., 2] != 20).all()


def test_a_search_leaves_regions_where_they_are(street):
    model = spot.adapt(nano())
    start = glimpse_positions(street, torch.tensor([[[0.4, 0.5, 20.0]]] * 2), 9, 8)
    found = spot.search(model, street, torch.tensor([1, 3]), start, PRESETS["authors"])
    assert torch.equal(found.positions[..., 3:], start[..., 3:])
    assert not torch.equal(found.positions[..., :2], start[..., :2])


def test_bad_regions_and_glimpses_get_a_sentence(street):
    model = spot.adapt(nano())
    flat = torch.cat([grid_positions((2, 2)), torch.tensor([[1, 0.5, 0.5, 0.0, 1.0]] * 4)], -1).expand(2, -1, -1)
    with pytest.raises(InputError, match="a region must have a height and a width"):
        model(street, flat)
    with pytest.raises(InputError, match=r"glimpses must have shape \(2, G, 3\)"):
        glimpse_positions(street, torch.zeros(2, 3), 9, 8)
    with pytest.raises(InputError, match="1 tokens are too few for 2 glimpses"):
        glimpse_positions(street, torch.zeros(2, 2, 3) + 0.5, 1, 8)


@torch.no_grad()
def test_an_exported_graph_takes_regions(street):
    from spot.export.graph import Graph

    model = spot.adapt(nano(img_size=16))  # scales up to 2: the branches of larger ones are in tests/export
    positions = glimpse_positions(street, torch.tensor([[[0.4, 0.5, 20.0]]] * 2), 9, 8)
    (got,) = Graph(model, image="float", columns=7)(street, positions)
    torch.testing.assert_close(got, model(street, positions), atol=1e-5, rtol=0)
    assert (got - model(street, positions[..., :3].contiguous())).abs().max() > 2e-4  # of logits that differ little


def test_a_picture_shows_regions_and_what_the_tokens_saw():
    from spot.plots.placements import windows_figure

    image = torch.rand(3, 90, 130)
    positions = glimpse_positions(image[None], torch.tensor([[[0.4, 0.5, 20.0], [0.7, 0.2, 30.0]]]), 18, 8)[0]
    figure = windows_figure(image, positions, 8, [{"class": "sign", "probability": 90.0}])
    left, right, _ = figure.axes
    boxes = [path.get_extents() for path in left.collections[-1].get_paths()]
    assert sorted(round(box.width) for box in boxes) == [20, 30]
    assert right.images[0].get_array().shape[:2] == (24, 24 + 4 + 24)  # 3 × 3 windows of 8 samples, twice
