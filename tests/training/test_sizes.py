"""Distillation with windows of several sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spot.errors import InputError
from spot.options import TrainOptions
from spot.training.batches import Part
from spot.training.objectives import Distil, sample_map
from spot.training.recipes import RECIPES, override
from spot.training.run import training_images
from tests.conftest import make_nano
from tests.training.small_run import make_images, small_recipe

SMALL = {"img_size": 32, "budgets": ((4,), (9,), (16,)), "shares": (1.0, 1.0, 1.0), "weights": (1.0, 1.0, 1.0)}


def part(count=4, step=3):
    images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(step))
    return Part(step, 0, count, images, torch.full((count,), -1))


def objective(**changes):
    recipe = override(RECIPES["distil-sizes"], {**SMALL, "priors": ("isotropic",), **changes})
    return Distil(make_nano(), recipe)


def test_scales_are_drawn_for_each_image_around_the_rule_and_end_at_tiling():
    distil = objective()
    placements = [distil.place(part().images, 0, part(step=step)) for step in range(60)]
    assert all(each.shape == (4, 4, 3) for each in placements)
    scales = torch.stack([each[..., 2] for each in placements])
    assert (scales == scales[..., :1]).all()  # one for all windows of an image
    assert scales.min() >= 1 and scales.max() <= 2  # 4 windows of 16 pixels tile 32 × 32
    assert scales.std() > 0.1
    assert scales.log2().median() == pytest.approx(0.7, abs=0.1)
    assert distil.place(part().images, 2, part()).shape == (4, 16, 2)  # the grid has no scale


def test_a_batch_cut_into_parts_has_the_same_scales():
    distil, whole = objective(), part(4)
    second = whole._replace(first=2, images=whole.images[2:], labels=whole.labels[2:])
    assert torch.equal(distil.place(whole.images, 0, whole)[2:], distil.place(second.images, 0, second))


def test_without_sizes_positions_have_two_columns():
    assert objective(sizes=None).place(part().images, 0, part()).shape == (4, 4, 2)


def test_the_target_of_a_large_window_is_the_mean_of_the_map_over_it():
    tokens = torch.randn(1, 16, 6)
    grid = tokens.transpose(1, 2).unflatten(2, (4, 4))
    quarters = torch.tensor([[[y, x, 2.0] for y in (0.25, 0.75) for x in (0.25, 0.75)]])
    # Window and cells begin and end together, but a bilinear map is smooth across cells: blurred by one cell.
    expected = F.avg_pool2d(F.avg_pool2d(F.pad(grid, (1, 1, 1, 1), mode="replicate"), 3, 1), 2)
    close = sample_map(tokens, (4, 4), quarters)[0].T.view(6, 2, 2)
    assert F.cosine_similarity(close.flatten(), expected.flatten(), 0) > 0.8
    # At scale 1 it is the bilinear map; over the whole map of equal cells it is their value.
    points = torch.rand(1, 7, 2)
    sized = torch.cat([points, torch.ones(1, 7, 1)], -1)
    torch.testing.assert_close(sample_map(tokens, (4, 4), sized), sample_map(tokens, (4, 4), points))
    even = sample_map(torch.ones(1, 16, 3), (4, 4), quarters)
    torch.testing.assert_close(even, torch.ones(1, 4, 3))


def test_the_loss_has_gradients():
    distil = objective()
    loss = distil(part()).loss
    loss.backward()
    assert loss.isfinite() and distil.model.vit.blocks[0].mlp.fc1.weight.grad.abs().sum() > 0


def test_a_retrofit_with_sizes_places_at_scale_auto():
    distil = objective()
    assert distil.finish(distil.model).scale == "auto"
    distil = objective(sizes=None)
    assert distil.finish(distil.model).scale is None


def test_a_deviation_of_sizes_is_at_least_0():
    recipe = RECIPES["distil-sizes"]
    with pytest.raises(InputError, match="at least 0"):
        replace(recipe, sizes=-1.0)


def test_images_that_a_file_names_are_never_trained_on(tmp_path):
    make_images(tmp_path / "images")
    asked = TrainOptions(data=str(tmp_path / "images"), out=tmp_path / "run")
    every = training_images(make_nano(), small_recipe("distil"), asked).keys
    (tmp_path / "aside.txt").write_text(f"{every[2]}\n{every[7]}\n")
    left = training_images(make_nano(), small_recipe("distil"), replace(asked, leave_out=tmp_path / "aside.txt"))
    assert list(left.keys) == [key for key in every if key not in (every[2], every[7])]
    assert [left.read(index)[2] for index in range(3)] == list(left.keys[:3])
    (tmp_path / "aside.txt").write_text("other/image.jpg\n")
    with pytest.raises(InputError, match=r"no image other/image\.jpg to leave out"):
        training_images(make_nano(), small_recipe("distil"), replace(asked, leave_out=tmp_path / "aside.txt"))
    with pytest.raises(InputError, match="there is no file"):
        training_images(make_nano(), small_recipe("distil"), replace(asked, leave_out=tmp_path / "none.txt"))


def test_the_list_of_images_set_aside_has_one_of_each_of_500_classes():
    names = (Path(__file__).parents[2] / "tools" / "set_aside.txt").read_text().split()
    assert len(names) == len({name.split("/")[0] for name in names}) == 500
