"""What a student is shown, to compare placed windows with, and a smaller image that is merged."""

import pytest
import torch
import torch.nn.functional as F

from paper.equal_training import Dropped, Merged, Resized, SmallerMerged, schedule_for_smaller_image
from spot.models.baselines import Resize, tome_at_cost
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.tome_schedule import windows_and_blocks_macs
from spot.training.batches import MicroBatch
from spot.training.objectives import FeaturePass
from tests.conftest import make_nano
from tests.training.small_run import small_recipe

PASSES = {"budgets": ((4,), (9,), (16,)), "shares": (1.0, 1.0, 1.0), "weights": (1.0, 1.0, 1.0)}


def part() -> MicroBatch:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    return MicroBatch(3, 0, 4, images, torch.full((4,), -1))


def objective(kind, **changes):
    return kind(make_nano(), small_recipe("distil-sizes", **PASSES, scale_std=None, **changes))


@pytest.mark.parametrize("kind", [Dropped, Resized, Merged])
def test_the_loss_has_gradients_with_every_view(kind):
    distil = objective(kind)
    loss = distil(part()).loss
    loss.backward()
    block = distil.model.vit.blocks[0]
    assert loss.isfinite()
    assert all(weight.grad.abs().sum() > 0 for weight in (block.attn.qkv.weight, block.mlp.fc1.weight))


def test_dropout_keeps_different_patches_of_the_grid():
    positions = objective(Dropped).place(part().images, 1, part())
    cells = {tuple(each) for each in make_nano().grid().tolist()}
    assert positions.shape == (4, 9, 2)
    assert all(tuple(each) in cells for image in positions.tolist() for each in image)
    assert all(len({tuple(each) for each in image}) == 9 for image in positions.tolist())


def test_resize_shows_the_grid_of_a_smaller_image():
    distil = objective(Resized)
    positions = distil.place(part().images, 1, part())
    assert positions.shape == (4, 9, 3)
    assert positions[0, 0].tolist() == pytest.approx([1 / 6, 1 / 6, 4 / 3])


def test_merging_is_taught_at_the_cost_of_the_budget():
    distil, step = objective(Merged, features=1.0), part()
    kept = FeaturePass(distil.model, distil.depths)(step.images, distil.model.grid(step.images))
    merged = distil.student(step.images, step.images, 1.0, 9)
    expected = tome_at_cost(make_nano(), 9)
    torch.testing.assert_close(merged.logits, expected(step.images))
    assert not torch.allclose(merged.logits, kept.logits, atol=1e-4)
    torch.testing.assert_close(distil.student(step.images, step.images, 1.0, 16).logits, kept.logits)
    divergence = F.kl_div(merged.logits.log_softmax(1), kept.logits.log_softmax(1), log_target=True, reduction="none")
    apart = 1 - F.cosine_similarity(merged.pooled, kept.pooled)
    torch.testing.assert_close(distil.difference(merged, kept, step.images), divergence.sum(1) + apart)


IMAGES = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> SpotViT:
    return make_nano(depth=12, img_size=64)


@torch.no_grad()
def test_a_smaller_image_is_shrunk_and_then_merged(model):
    merged = SmallerMerged(model, 25)
    assert merged.starting_tokens == 36 and sum(merged.schedule()) > 0
    small = torch.nn.functional.interpolate(IMAGES, (48, 48), mode="bicubic", antialias=True)  # 6 patches of 8 a side
    expected = ToMe(model.at(tokens=36), merged.schedule(), own_placement=True)(small, Resize(model, 36).place(IMAGES))
    torch.testing.assert_close(merged(IMAGES), expected)
    assert (merged(IMAGES) - Resize(model, 36)(IMAGES)).abs().max() > 1e-4  # merging makes a difference


@pytest.mark.parametrize("tokens", [9, 16, 25, 36])
def test_a_smaller_image_that_merges_costs_no_more_than_its_budget(model, tokens):
    count, schedule = schedule_for_smaller_image(model, tokens)
    assert count >= tokens and windows_and_blocks_macs(model, count, schedule) <= windows_and_blocks_macs(model, tokens)
