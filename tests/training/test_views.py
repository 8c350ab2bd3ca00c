"""Fixed views: the same picture whenever it is visited, and a teacher that is asked once."""

import pytest
import torch

from spot.data.images import open_data
from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.options import TrainOptions
from spot.training.batches import Part, Targets, ViewPlan, views_folder
from spot.training.objectives import Distil
from spot.training.run import training_images
from tests.conftest import make_nano
from tests.training.small_run import interrupted_after, make_images, small_recipe, small_run
from tests.training.test_loop import weights

DISTIL = {"views": 2, "mix_share": 0.5}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images") / "all")


def plan(data, folder):
    config = {**make_nano().data_config, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
    return ViewPlan(open_data(str(data), transform=None), small_recipe("distil", **DISTIL), config, None, folder)


def test_an_image_looks_the_same_every_other_epoch_and_in_another_run(data, tmp_path):
    first, again = plan(data, tmp_path / "a"), plan(data, tmp_path / "b")
    shown = {}
    for place in range(3 * len(first)):
        pixels, label, view = first[place]
        assert label == -1
        assert torch.equal(shown.setdefault(view, pixels), pixels)
    assert len(shown) == 2 * len(first)  # two views of each
    by_image = [torch.equal(shown[2 * number], shown[2 * number + 1]) for number in range(len(first))]
    assert not any(by_image)
    for place in (5, 40):
        assert torch.equal(again[place][0], first[place][0])


def test_a_view_is_normalised_and_near_its_crop_or_mixture(data, tmp_path):
    views = plan(data, tmp_path)
    pixels, _, view = views[7]
    raw = views.mixed(*divmod(view, 2))
    mean, std = (torch.tensor(each)[:, None, None] for each in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    assert (pixels * std + mean - raw).abs().max() <= 0.5 / 255 + 1e-6  # kept as bytes
    crops = sum(torch.equal(views.mixed(number, 0), views.crop(number, 0)) for number in range(30))
    assert 5 <= crops <= 25  # the others are mixtures of two


def test_the_teacher_is_asked_once_and_its_answer_is_kept(data, tmp_path, monkeypatch):
    model = make_nano()
    distil = Distil(model, small_recipe("distil", **DISTIL))
    distil.targets = Targets(tmp_path, 60)
    images = torch.randn(8, 3, 32, 32)
    views = torch.tensor([3, 9, 0, 59, 7, 8, 20, 21])
    direct = distil.predict(distil._teacher[0], images, model.grid(images))
    asked = []
    real = SpotViT.token_features
    monkeypatch.setattr(
        SpotViT,
        "token_features",
        lambda self, x, *rest, **how: (asked.append(len(x)), real(self, x, *rest, **how))[1],
    )
    distil.target(images[:5], views[:5])
    kept = distil.target(images, views)
    distil.targets = Targets(tmp_path, 60)  # as a run that goes on would open it
    read = distil.target(torch.zeros_like(images), views)
    assert asked == [5, 3]
    torch.testing.assert_close(kept.logits, direct.logits, atol=2e-3, rtol=2e-3)
    for ours, theirs in zip(kept.features, direct.features, strict=True):
        torch.testing.assert_close(ours.tokens, theirs.tokens, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(ours.prefix, theirs.prefix, atol=2e-3, rtol=2e-3)
    assert torch.equal(read.logits, kept.logits) and torch.equal(read.pooled, kept.pooled)


def test_stopped_and_resumed_is_bit_identical_and_leaves_no_views(data, tmp_path, monkeypatch):
    small_run("distil", data, tmp_path / "whole", **DISTIL)
    with interrupted_after(5, monkeypatch):
        small_run("distil", data, tmp_path / "cut", **DISTIL)
    assert list((tmp_path / "cut" / "views").rglob("logits.bin"))
    small_run("distil", data, tmp_path / "cut", **DISTIL)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (tmp_path / "cut" / "views").exists()


def test_runs_share_a_cache_and_another_teacher_has_its_own(data, tmp_path):
    cache = {"cache": tmp_path / "cache"}
    small_run("distil", data, tmp_path / "first", cache, **DISTIL)
    small_run("distil", data, tmp_path / "second", cache, seed=1, **DISTIL)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    small_run("distil", data, tmp_path / "third", cache | {"teacher": str(tmp_path / "first" / "model")}, **DISTIL)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_views_that_look_otherwise_have_another_folder(tmp_path):
    recipes = [small_recipe("distil", views=2, **change) for change in ({}, {"randaug": (9, 0.5)}, {"flip": 0.0})]
    assert len({views_folder(tmp_path, "teacher", {"count": 8}, recipe) for recipe in recipes}) == 3


def test_scenes_have_no_fixed_views(tmp_path):
    recipe = small_recipe("distil", views=2, img_size=64, balance=0.0)
    with pytest.raises(InputError, match="views=0"):
        training_images(make_nano(), recipe, TrainOptions(data="scenes", out=tmp_path))


def test_parts_without_views_ask_the_teacher_as_before():
    distil = Distil(make_nano(), small_recipe("distil"))
    images = torch.randn(4, 3, 32, 32)
    assert distil(Part(0, 0, 4, images, torch.full((4,), -1))).loss.isfinite()
