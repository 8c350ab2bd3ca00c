"""The built-in models as shipped: small, good on the grid, and better off it than their parents."""

from functools import cache

import pytest
import torch

import spot
from spot.data.images import data_for
from spot.data.loader import loader
from spot.data.scenes import CLASSES
from spot.evaluation.accuracy import Setting, evaluate
from spot.evaluation.cost import macs
from spot.models.checkpoints import read_weights
from spot.models.family import is_delta, read_delta
from spot.models.shipped import built_in

NAMES = ("scenes-a", "scenes-a-grid", "scenes-b", "scenes-b-grid", "scenes-mae")
NEEDLE = "scenes-needle"
RETROFITS = ("vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot", "deit_tiny_patch16_224.fb_in1k+spot")
IMAGES = 160  # five of each class; one standard deviation is 3 points


@cache
def accuracy(name: str) -> dict[int, float]:
    """Top-1 in percent on fresh scenes, by tokens."""
    model = spot.load(name)
    scenes = data_for(model, "scenes", split="test", limit=IMAGES)
    settings = [Setting("isotropic", tokens) for tokens in (16, 64)]
    found = evaluate(model, loader(scenes, 64), settings, shown=False)
    return {row["tokens"]: row["top1"] for row in found.rows()}


@pytest.mark.parametrize("name", NAMES)
def test_dense_accuracy_is_good_and_below_saturation(name):
    assert 80 < accuracy(name)[64] < 99.5


@pytest.mark.parametrize("name", ["scenes-a", "scenes-b"])
def test_a_retrofit_reads_few_tokens_better_than_its_grid_parent(name):
    assert accuracy(name)[16] > accuracy(f"{name}-grid")[16] + 5


def test_the_models_are_small_and_described():
    assert {*built_in()} == {*NAMES, NEEDLE, *RETROFITS}
    assert sum(built_in()[name].stat().st_size for name in NAMES) <= 10e6
    path = built_in()[NEEDLE]
    assert path.stat().st_size <= 3e6  # with its policy
    assert f"| {NEEDLE} |" in path.with_name("NEEDLE.md").read_text()


def test_its_policy_finds_the_needle():
    """With a ninth of the tokens most of the dense accuracy is kept, of which even windows lose more than half."""
    model = spot.load(NEEDLE)
    scenes = data_for(model, "needle", split="test", limit=32)
    settings = [Setting("isotropic", 576), Setting("isotropic", 64), Setting("learned", 64)]
    dense, even, learned = (row["top1"] for row in evaluate(model, loader(scenes, 32), settings, shown=False).rows())
    assert learned > 0.8 * dense and even < 0.5 * dense
    ours, all_ = (macs(model.at(tokens=tokens, prior=prior)) for tokens, prior in ((64, "learned"), (576, "isotropic")))
    assert ours <= all_ / 12


@pytest.mark.parametrize("name", RETROFITS)
def test_a_real_retrofit_is_a_delta_of_at_most_8_megabytes_on_the_timm_model_it_names(name):
    path = built_in()[name]
    assert is_delta(path) and path.stat().st_size <= 8e6
    assert read_delta(path)[1]["base"] + "+spot" == name
    assert f"| {name} |" in path.with_name("RETROFITS.md").read_text()


@pytest.mark.parametrize("name", RETROFITS)
def test_a_real_retrofit_reads_few_tokens_and_still_its_grid(name, shared_data):
    weights = shared_data / "weights" / f"{name.removesuffix('+spot')}.safetensors"
    before, after = spot.load(name.removesuffix("+spot"), weights=weights), spot.load(name, weights=weights)
    images = data_for(after, str(shared_data / "imagenet-val-2k"), limit=50)
    settings = [Setting("isotropic", tokens) for tokens in (49, 196)]
    untrained, trained = (
        [row["top1"] for row in evaluate(model, loader(images, 50), settings, shown=False).rows()]
        for model in (before, after)
    )
    assert trained[0] > untrained[0] + 10  # at 49 tokens; one standard deviation is 7 points
    assert trained[1] > untrained[1] - 15


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_names_its_classes_has_a_card_and_is_kept_in_half_precision(name):
    assert spot.load(name).class_names == list(CLASSES) and CLASSES[4 * 5 + 1] == "stripes star"
    assert spot.load(name, num_classes=3).class_names is None
    assert f"| {name} |" in built_in()[name].with_name("README.md").read_text()
    assert {tensor.dtype for tensor in read_weights(built_in()[name]).values()} == {torch.float16}
