"""The numbers are those of the plainest possible loop, whatever the batch, process or company."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import spot
from spot.data.images import open_data
from spot.data.loader import Batch, loader
from spot.data.picture import evaluation_transform
from spot.draws import generator_for
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate, judge, wilson, with_models
from spot.evaluation.cost import macs
from spot.models.baselines import BASELINES, ElasticViT, PatchDropout, tome_at_cost
from spot.models.tome import ToMe
from spot.models.tome_schedule import schedule_for_tokens
from spot.models.wrappers import PlainViT
from spot.options import Baseline
from spot.placement.files import Placements
from spot.placement.priors import PRIORS
from tests.conftest import make_nano, write_noise

IMAGES = 23  # odd on purpose: the last batch and the processes' shares are uneven


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_noise(tmp_path / "images", IMAGES)


@pytest.fixture
def data(folder, nano):
    return open_data(folder, transform=evaluation_transform(nano.data_config), classes=10)


# One image's verdict and its interval ---------------------------------------------------------


def batch(labels: list[int]) -> Batch:
    return Batch(torch.empty(len(labels), 0), torch.tensor(labels), [f"image {label}" for label in labels])


@pytest.mark.parametrize(
    "logits, label, prediction, rank",
    [
        ([0.1, 0.9, 0.5, 0.2], 1, 1, 0),
        ([0.1, 0.9, 0.5, 0.2], 2, 1, 1),
        ([0.1, 0.9, 0.5, 0.2], 0, 1, 3),
        ([0.0] * 6, 0, 0, 0),  # the lower of two equal classes comes first
        ([0.0] * 6, 5, 0, 5),
        ([np.nan] * 6, 0, 0, 6),  # a model that predicts NaN is wrong
        ([1.0, np.nan, 0.0], 0, 1, 1),
    ],
)
def test_the_rank_is_how_many_classes_came_before_the_label(logits, label, prediction, rank):
    assert judge(torch.tensor([logits]), batch([label]))[0, :2].tolist() == [prediction, rank]


def test_the_loss_is_minus_the_log_of_the_labels_probability():
    verdict = judge(torch.tensor([[0.0, 0.0, 0.0, 0.0], [np.log(3.0), 0.0, -1e4, -1e4]]), batch([2, 0]))
    torch.testing.assert_close(verdict[:, 2], torch.tensor([np.log(4), -np.log(0.75)]))


@pytest.mark.parametrize(
    "label, sentence",
    [(-1, "image -1 has no label"), (6, "image 6 has label 6, but the model has 6 classes")],
)
def test_images_without_a_label_or_with_an_impossible_one_are_named(label, sentence):
    with pytest.raises(InputError, match=sentence):
        judge(torch.zeros(1, 6), batch([label]))


@pytest.mark.parametrize(
    "right, count, low, high",  # Newcombe (1998), table I, method 3, and Brown, Cai & DasGupta (2001)
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_is_wilsons(right, count, low, high):
    assert wilson(right / count, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("count", [1, 64, 320, 2000])
def test_the_interval_holds_the_share_seen_even_of_none_or_all(count):
    assert wilson(1.0, count)[1] == 1.0
    assert wilson(0.0, count)[0] == 0.0


# Against the plainest loop ---------------------------------------------------------------------


@torch.no_grad()
def one_by_one(model, data, prior: str, tokens: int, seed: int) -> list[int]:
    """Predicted classes in the order of keys, an image at a time."""
    found = {}
    for image, _, key in data:
        positions = PRIORS[prior](image[None], tokens, generator_for(seed, key))
        found[key] = int(model(image[None], positions).argmax())
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_predictions_are_those_of_one_image_at_a_time(nano, data, batch_size):
    cases = [("isotropic", 4, 0), ("uniform", 4, 0), ("uniform", 4, 1), ("sobol", 9, 7)]
    found = evaluate(nano, loader(data, batch_size), [Setting(*case) for case in cases])
    assert found.keys == sorted(data.keys)
    assert [setting.tokens for setting in found.settings] == [4, 4, 4, 9]
    for predictions, case in zip(found.predictions, cases, strict=True):
        assert predictions.tolist() == one_by_one(nano, data, *case)
    assert found.predictions[1].tolist() != found.predictions[2].tolist()  # the seed does something


def test_a_row_is_what_its_images_say_and_pools_its_seeds(nano, data):
    settings = [Setting("isotropic", 4), *(Setting("uniform", 4, seed) for seed in range(3))]
    found = evaluate(nano, loader(data, 8), settings)
    labels = [int(key.split("/")[0]) for key in found.keys]
    right = [100 * np.mean(np.array(predictions) == labels) for predictions in found.predictions.tolist()]
    one, pooled = found.rows()
    assert (one["placement"], one["tokens"], one["images"]) == ("isotropic", 4, IMAGES)
    assert one["top1"] == pytest.approx(right[0])
    assert one["low"] <= one["top1"] <= one["high"] and one["top5"] >= one["top1"]
    assert one["std"] is None
    assert pooled["top1"] == pytest.approx(np.mean(right[1:]))
    assert pooled["std"] == pytest.approx(np.std(right[1:], ddof=1))
    assert (pooled["seeds"], pooled["images"]) == (3, IMAGES)


def test_every_image_is_decoded_once_for_all_settings(nano, folder):
    seen = []
    transform = evaluation_transform(nano.data_config)

    def counted(image):
        seen.append(image)
        return transform(image)

    data = open_data(folder, transform=counted, classes=10)
    evaluate(nano, loader(data, 8), [Setting(prior, tokens) for prior in PRIORS for tokens in (1, 4)])
    assert len(seen) == IMAGES


# What a setting can be ------------------------------------------------------------------------------


def test_placements_are_found_by_key_and_not_by_order(nano, data):
    keys = list(reversed(data.keys))
    positions = torch.rand(len(keys), 5, 2, generator=torch.Generator().manual_seed(3))
    found = evaluate(nano, loader(data, 8), [Setting(Placements(keys, positions))])
    by_key = dict(zip(keys, positions, strict=True))
    with torch.no_grad():
        expected = {key: int(nano(image[None], by_key[key][None]).argmax()) for image, _, key in data}
    assert found.predictions[0].tolist() == [expected[key] for key in found.keys]
    assert found.settings[0].tokens == 5


def test_other_models_answer_the_same_call(nano, data):
    settings = [
        Setting(name="timm", model=PlainViT(nano)),
        Setting("isotropic", 16),
        Setting(model=PatchDropout(nano, 16)),
        Setting(seed=1, model=PatchDropout(nano, 5)),
    ]
    found = evaluate(nano, loader(data, 8), settings)
    with torch.no_grad():
        expected = {key: int(nano.vit(image[None]).argmax()) for image, _, key in data}
    dense = [expected[key] for key in found.keys]
    assert [predictions.tolist() for predictions in found.predictions[:3]] == [dense] * 3
    assert [row["placement"] for row in found.rows()] == ["timm", "isotropic", "PatchDropout", "PatchDropout"]
    assert [row["tokens"] for row in found.rows()] == [16, 16, 16, 5]


def test_salient_placements_draw_from_maps_found_by_key_or_the_models_own(nano, data):
    calls = []

    def corner(images, keys):
        calls.extend(keys)
        maps = torch.zeros(len(images), *images.shape[-2:])
        maps[:, :4, :4] = 1
        return maps

    settings = [Setting("salient", 4), Setting("salient", 9)]
    found = evaluate(nano, loader(data, 8), settings, saliency=corner)
    assert calls == list(data.keys)  # once per batch, not per setting
    own = evaluate(nano, loader(data, 8), settings)
    assert torch.equal(own.losses, evaluate(nano, loader(data, 8), settings, saliency=nano.saliency_maps).losses)
    assert not torch.equal(own.losses, found.losses)


def test_data_and_placements_may_be_names_and_the_budget_is_the_models(nano, folder):
    nano.tokens = 7
    found = spot.evaluate(nano, folder, ["isotropic", "center", "patch-dropout"]).rows()
    assert [(row["placement"], row["tokens"]) for row in found] == [
        ("isotropic", 7), ("center", 7), ("patch-dropout", 16)
    ]  # fmt: skip
    assert spot.evaluate(nano, folder).rows()[0]["top1"] == found[0]["top1"]  # the model's own
    assert (nano.tokens, nano.prior) == (7, "isotropic")  # left as it was


def test_baselines_go_by_their_names(nano, data):
    """Setting("tome") and Setting("tome-cost") are two models; each is the one made by hand."""
    names = {"plain": None, "patch-dropout": 5, "tome": 5, "tome-cost": 9, "elastic": 5}
    found = evaluate(nano, loader(data, 8), [Setting(name, tokens) for name, tokens in names.items()])
    by_hand = [
        PlainViT(nano), PatchDropout(nano, 5), ToMe(nano, schedule_for_tokens(nano, 5)), tome_at_cost(nano, 9),
        ElasticViT(nano, 5),
    ]  # fmt: skip
    expected = evaluate(nano, loader(data, 8), [Setting(model=model) for model in by_hand])
    assert torch.equal(found.losses, expected.losses)
    assert [row["placement"] for row in found.rows()] == list(names)
    assert [setting.random for setting in found.settings] == [BASELINES[name].random for name in names]


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda nano: Setting(Placements(["a"], torch.rand(1, 5, 2)), 6), "have 5 tokens, not 6"),
        (lambda nano: Setting(tokens=6, model=PatchDropout(nano, 5)), "has 5 tokens, not 6"),
        (lambda nano: Setting("plain", 5), "plain ViT has all 16 tokens of its grid, not 5"),
        (lambda nano: Setting("isotropic", 0), "at least 1"),
        (lambda nano: Setting("isotropc", 4), "'isotropic'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_before_any_image_is_read(nano, make, sentence):
    with pytest.raises(InputError, match=sentence):
        with_models(nano, [make(nano)])


def test_a_model_in_training_is_left_in_training(nano, data):
    nano.train()
    nano.vit.norm.eval()
    evaluate(nano, loader(data), [Setting("isotropic", 4), Setting(model=PatchDropout(nano, 4))])
    assert nano.training
    assert nano.vit.blocks.training
    assert not nano.vit.norm.training


def test_nothing_readable_is_nothing_to_measure(nano, tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "a.png").write_text("not an image")
    data = open_data(tmp_path, transform=evaluation_transform(nano.data_config), skip=True)
    with pytest.raises(InputError, match="no image could be read"):
        evaluate(nano, loader(data), [Setting("isotropic", 4)])


# The real model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit_tiny", "deit_tiny"])
def test_a_real_model_is_right_where_timm_is_right(name, shared_data, request):
    model: spot.SpotViT = request.getfixturevalue(name)
    from spot.data.classes import class_folders

    transform = evaluation_transform(model.data_config)
    data = open_data(shared_data / "imagenet-val-2k", transform=transform, classes=class_folders(model), limit=16)
    found = evaluate(model, loader(data, 16), [Setting("isotropic", 196)])
    with torch.no_grad():
        expected = {key: int(model.vit(image[None]).argmax()) for image, _, key in data}
    assert found.predictions[0].tolist() == [expected[key] for key in found.keys]
    assert found.rows()[0]["top1"] > 50


def test_a_setting_s_scale_is_in_what_is_timed_and_counted(nano):
    nano.scale = "auto"
    images = torch.zeros(1, 3, 32, 32)
    settings = with_models(nano, [Setting("isotropic", 4, scale=scale) for scale in (None, 1)])
    own, fixed = (setting.model for setting in settings)
    assert own.place(images).shape[-1] == 3  # with sizes
    assert fixed.place(images).shape[-1] == 2
    assert macs(fixed) < macs(own)  # which need the image's pyramid


def test_the_command_line_knows_every_baseline():
    assert set(get_args(Baseline)) == set(BASELINES)


def test_only_seeds_are_pooled(nano, data):
    """Not another scale, another model of the same name, or placements from another file."""
    batches, keys = loader(data), list(data.keys)
    files = [Placements(keys, torch.full((len(keys), 4, 2), place)) for place in (0.2, 0.8)]
    settings = [Setting("uniform", 4, seed) for seed in range(2)] + [Setting("uniform", 4, scale=2)]
    settings += [Setting("uniform", 4, model=make_nano(seed=1)), *(Setting(file) for file in files)]
    settings += [Setting("patch-dropout", 4, seed) for seed in range(2)]
    made = evaluate(nano, batches, settings)
    assert made.groups() == [[0, 1], [2], [3], [4], [5], [6, 7]]
    assert [row["seeds"] for row in made.rows()] == [2, 1, 1, 1, 1, 2]


@torch.no_grad()
def test_features_are_in_the_order_of_the_keys(data, nano):
    data.keep([3, 0, 5, 1])
    found = evaluate(nano, loader(data, 3), [Setting("isotropic", 4)], features=True)
    images = {key: image[None] for image, _, key in data}
    for key, features in zip(found.keys, found.features[0], strict=True):
        tokens = nano.forward_features(images[key], nano.place(images[key], tokens=4, prior="isotropic"))
        torch.testing.assert_close(features, nano.forward_head(tokens, pre_logits=True)[0])


@torch.no_grad()
def test_merged_tokens_are_pooled_by_their_sizes(folder):
    model = make_nano(global_pool="avg").eval()
    tome = ToMe(model, 2)
    data = open_data(folder, transform=model.transform(), limit=4)
    found = evaluate(model, loader(data), [Setting(model=tome)])
    logits = {key: tome(image[None]) for image, _, key in data}
    for key, label, loss in zip(found.keys, found.labels, found.losses[0], strict=True):
        assert loss.item() == pytest.approx(F.cross_entropy(logits[key], label[None]).item(), abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [([], "at least one setting"), ([("isotropic", 9)], "a setting must be"), (["centre"], "'centre'")],
)
def test_senseless_settings_get_a_sentence(data, nano, settings, sentence):
    with pytest.raises(InputError, match=sentence):
        evaluate(nano, loader(data), settings)


def test_a_prior_does_not_go_with_a_baseline_that_places_its_own_tokens(nano):
    with pytest.raises(InputError, match="places tokens in its own way"):
        with_models(nano, [Setting("isotropic", 5, model=PatchDropout(nano, 5))])
