"""Few tokens first, more for images that need them."""

import copy
from itertools import product

import pytest
import torch

import spot
from spot.data.images import data_for
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.evaluation.early_exit import (
    Predicted,
    calibrate,
    choose_cascade,
    find_thresholds,
    fit_weights,
    measure,
    possible_stages,
    predict_all,
)
from spot.models.cascade import Cascade, Stage
from spot.models.tome import ToMe
from spot.models.tome_schedule import blocks_macs
from tests.models.test_checkpoints import authors_state


@pytest.fixture(scope="module")
def batches():
    return list(loader(data_for(spot.load("scenes-a"), "scenes", limit=96), 48))


@pytest.fixture(scope="module")
def model():
    return spot.load("scenes-a")


@pytest.fixture(scope="module")
def cascade(model, batches):
    return calibrate(model, batches, budgets=(9, 16, 25), agree=0.97, merge=False)


@pytest.fixture
def images(batches):
    return batches[0].images


def by_hand(model, cascade, image, until=None):
    """One image, stage by stage, in the plainest way."""
    known, tokens, cost = None, 0, 0
    for number, stage in enumerate(cascade.stages):
        last = number + 1 == len(cascade.stages)
        positions = model.grid(image) if last else model.place(image, tokens=stage.tokens)
        said = model(image, positions).log_softmax(1)
        known = stage.weight * said if known is None else stage.weight * said + stage.earlier_weight * known
        tokens, cost = tokens + positions.shape[1], cost + stage.macs
        if last or known.softmax(1).max() >= (stage.threshold if until is None else until):
            return known[0], tokens, cost


@pytest.mark.parametrize("until", [None, 0.6, 1.0])
def test_a_batch_that_shrinks_predicts_what_each_image_alone_does(model, cascade, images, until):
    with torch.no_grad():
        *before, step = cascade(images, until)
        for row in range(len(images)):
            logits, tokens, cost = by_hand(model, cascade, images[row : row + 1], until)
            torch.testing.assert_close(step.logits[row], logits, rtol=1e-4, atol=1e-4)
            assert (int(step.tokens[row]), int(step.macs[row])) == (tokens, cost)
    assert step.done.all()
    rows = [len(each.rows) for each in (*before, step)]
    assert rows == sorted(rows, reverse=True)
    assert all(
        int((~each.done).sum()) == len(after.rows) for each, after in zip(before, [*before[1:], step], strict=True)
    )


def test_thresholds_are_the_cheapest_of_all(batches):
    draw = torch.Generator().manual_seed(0)
    confidences = [torch.rand(60, generator=draw) for _ in range(3)]
    agrees = [
        torch.rand(60, generator=draw) < share for share in (confidences[0], confidences[1] ** 0.5, torch.ones(60))
    ]
    found = find_thresholds(confidences, [each.float() for each in agrees], [1, 2, 5], 0.9)
    limits, cost = found.values, found.cost
    images = list(zip(*(each.tolist() for each in (*confidences[:2], *agrees)), strict=True))

    def outcome(first, second):
        agreed = spent = 0
        for c1, c2, a1, a2, a3 in images:
            stage = 0 if c1 >= first else 1 if c2 >= second else 2
            agreed, spent = agreed + bool((a1, a2, a3)[stage]), spent + (1, 3, 8)[stage]
        return agreed / 60, spent / 60

    share, spent = outcome(*limits)
    assert share >= 0.9 and spent == pytest.approx(cost) and share == pytest.approx(found.score)
    levels = torch.linspace(0, 1, 101).double()
    every = product(*([*each.double().quantile(levels).tolist(), 2.0] for each in confidences[:2]))
    outcomes = [outcome(*pair) for pair in every]
    assert cost == pytest.approx(min(spent for agreed, spent in outcomes if agreed >= 0.9))


def test_weights_make_the_sum_agree_best():
    draw = torch.Generator().manual_seed(0)
    own, earlier = (torch.randn(200, 7, generator=draw).log_softmax(1) for _ in range(2))
    dense = (1.7 * own + 0.4 * earlier).log_softmax(1)
    assert fit_weights(own, earlier, dense) == pytest.approx((1.7, 0.4), abs=1e-4)
    assert fit_weights(own, None, (2.5 * own).log_softmax(1)) == pytest.approx((2.5, 0.0), abs=1e-4)


def test_a_cascade_agrees_as_often_as_was_asked_for_where_it_was_calibrated(model, cascade, batches):
    predicted = predict_all(possible_stages(model, (9,), merge=False), batches, mirror=True)
    made = cascade.calibration
    both = [images for batch in batches for images in (batch.images, batch.images.flip(-1))]
    with torch.no_grad():
        ends = [list(cascade(images))[-1] for images in both]
        full = torch.cat([model(images, model.grid(images)) for images in both])
    torch.testing.assert_close(predicted.dense, full.log_softmax(1), rtol=1e-4, atol=1e-4)
    assert made["images"] == 96 and len(predicted.keys) == len(predicted.labels) == 192
    answers = torch.cat([step.logits.argmax(1) for step in ends])
    agreed = (answers == predicted.dense.argmax(1)).float().mean().item()
    assert agreed == pytest.approx(made["agreed"])
    assert agreed >= made["agree"] - 1e-6
    spent = torch.cat([step.macs for step in ends]).double().mean() / cascade.stages[-1].macs
    assert spent == pytest.approx(made["macs"], rel=1e-4) and spent < 1


def test_without_a_sure_early_stage_only_the_grid_is_left():
    wrong = torch.zeros(40, 3).log_softmax(1)
    dense = torch.eye(3)[torch.arange(40) % 3].mul(9).log_softmax(1)
    said = Predicted(torch.stack([wrong, dense]), dense, torch.zeros(40))
    chosen = choose_cascade(said, [Stage(9, 1), Stage(64, 10)], agree=1.0)
    assert ([stage.tokens for stage in chosen.stages], chosen.agreed, chosen.macs) == ([64], 1.0, 10)


# Three images, which the dense ViT gives 0.9 / 0.1, 0.6 / 0.4 and 0.52 / 0.48
DENSE = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.52, 0.48]]).log()
STAGES = [Stage(9, 1), Stage(64, 10)]


def few_tokens_err(second: float) -> Predicted:
    """The dense ViT, and a stage before it that errs on the second image."""
    few = torch.tensor([[0.9, 0.1], [second, 1 - second], [0.52, 0.48]]).log()
    return Predicted(torch.stack([few, DENSE]), DENSE, torch.zeros(3))


def test_what_is_lost_is_what_the_dense_vit_expects():
    predicted = few_tokens_err(0.4)
    sparing = choose_cascade(predicted, STAGES, lose=0.07)  # 0.2 / 3 is lost if all stop early
    assert [stage.tokens for stage in sparing.stages] == [9, 64] and sparing.macs == 1
    assert sparing.lost == pytest.approx(0.2 / 3) and sparing.agreed == pytest.approx(2 / 3)
    careful = choose_cascade(predicted, STAGES, lose=0.06)
    assert careful.lost == pytest.approx(0, abs=1e-6) and careful.macs > 1


def test_with_a_limit_of_cost_as_little_is_lost_as_that_allows():
    # Two images of three stop early at no loss, the third loses 0.2 where it does: 1 costs 10 more than stopping.
    predicted = few_tokens_err(0.45)
    assert choose_cascade(predicted, STAGES, max_cost=1.0).lost == pytest.approx(0, abs=1e-6)
    tight = choose_cascade(predicted, STAGES, max_cost=0.2)
    assert tight.macs == 1 and tight.lost == pytest.approx(0.2 / 3)
    some = choose_cascade(predicted, STAGES, max_cost=0.8)  # one image may go on, which is not the one that would gain
    assert some.macs <= 8 and some.lost <= tight.lost
    with pytest.raises(InputError, match="begin with fewer tokens"):
        choose_cascade(predicted, STAGES, max_cost=0.05)


def test_where_time_is_counted_multiply_adds_do_not_matter():
    predicted = Predicted(torch.stack([DENSE] * 3), DENSE, torch.zeros(3))
    seconds = {(9, ()): 0.8, (16, ()): 0.4, (64, ()): 1.0}  # fewer multiply-adds may take longer
    chosen = choose_cascade(predicted, [Stage(9, 1), Stage(16, 5), Stage(64, 10)], seconds=seconds)
    assert [stage.tokens for stage in chosen.stages] == [16, 64]
    assert (chosen.cost, chosen.macs) == (pytest.approx(0.4), 5)


def test_stages_may_merge(model, images, batches):
    stages = [stage for stage, _ in possible_stages(model, (16,))]
    # Six blocks: early stages merge from the third on, 2 or 3 in each of four; the grid's 64 from the second to fourth.
    by_hand = [
        (16, ()), (16, (0, 0, 2, 2, 2, 2)), (16, (0, 0, 3, 3, 3, 3)),
        (64, ()), (64, (0, 0, 11, 11, 11, 11)), (64, (0, 0, 10, 10, 10, 10)), (64, (0, 0, 13, 13, 13, 12)),
        (64, (0, 10, 10, 10, 10, 10)),
    ]  # fmt: skip
    assert sorted((each.tokens, each.merged) for each in stages) == sorted(by_hand)
    for stage in stages:
        if stage.merged and stage.tokens == 64:
            assert stage.macs == macs(ToMe(model, stage.merged)) < macs(model.at(tokens=64))
        else:
            saved = blocks_macs(model, stage.tokens) - blocks_macs(model, stage.tokens, stage.merged)
            assert stage.macs == macs(model.at(tokens=stage.tokens)) - saved
    made = [Stage(16, 1, 2.0, merged=(0, 0, 3, 3, 3, 3)), Stage(64, 2, merged=(3,) * 6)]
    merging = Cascade(model, made, prior="center")
    few = model.place(images[:4], tokens=16, prior="center")
    with torch.no_grad():
        first, last = merging(images[:4])
        torch.testing.assert_close(first.logits, ToMe(model, [0, 0, 3, 3, 3, 3])(images[:4], few).log_softmax(1))
        torch.testing.assert_close(last.logits, ToMe(model, 3)(images[:4]).log_softmax(1))
    torch.testing.assert_close(first.positions, few)
    assert (model.tokens, model.prior) == (64, "isotropic")  # left as they were
    made = [calibrate(model, batches[:1], budgets=(16,), lose=0.02, merge=merge).calibration for merge in (True, False)]
    assert made[0]["macs"] <= made[1]["macs"] and max(each["lost"] for each in made) <= 0.02


def test_a_cascade_is_a_module_that_owns_its_stages(cascade, images):
    assert (cascade.budgets[-1], cascade.stages[-1].threshold) == (64, 0)
    assert len(cascade.models) == len(cascade.stages)
    whole = copy.deepcopy(cascade).double()
    with torch.no_grad():
        *_, ours = cascade(images[:4])
        *_, theirs = whole(images[:4].double())
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-3, rtol=1e-3)


def test_measure_is_the_mean_over_images(model, cascade, batches):
    row = measure(cascade, batches, until=0.6)
    right = tokens = 0
    with torch.no_grad():
        for batch in batches:
            for image, label in zip(batch.images, batch.labels, strict=True):
                logits, count, _ = by_hand(model, cascade, image[None], 0.6)
                right, tokens = right + int(logits.argmax() == label), tokens + count
    assert row["top1"] == pytest.approx(100 * right / 96)
    assert row["tokens"] == pytest.approx(tokens / 96, abs=0.06)
    assert sum(row["stopped"].values()) == pytest.approx(1, abs=1e-3)


def test_a_cascade_is_read_again_for_its_model_and_no_other(model, cascade, images, tmp_path):
    cascade.save(tmp_path / "c.cascade.json")
    again = Cascade.load(tmp_path / "c.cascade.json", model)
    assert (again.stages, again.prior, again.calibration) == (cascade.stages, cascade.prior, cascade.calibration)
    with torch.no_grad():
        torch.testing.assert_close(list(again(images))[-1].logits, list(cascade(images))[-1].logits)
    with pytest.raises(InputError, match="calibrated for other weights"):
        Cascade.load(tmp_path / "c.cascade.json", spot.load("scenes-b"))
    with pytest.raises(InputError, match="needs the model it was calibrated for"):
        Cascade.load(tmp_path / "c.cascade.json")


def test_bad_input_is_one_sentence(model, cascade, images, batches, tmp_path):
    with pytest.raises(InputError, match="scenes-a has no calibrated cascade"):
        Cascade.load("scenes-a")
    with pytest.raises(InputError, match="until is a confidence"):
        cascade(images, until=80)
    for options, sentence in (
        ({"agree": 99}, "agree is a share"),
        ({"cost": 65}, "above 0 and at most 1, got 65"),
        ({"cost": 0.5, "agree": 0.9}, "give only one of"),
        ({"lose": 1}, "is one point"),
        ({"budgets": (64,)}, "below the grid's 64 tokens"),
    ):
        with pytest.raises(InputError, match=sentence):
            calibrate(model, batches, **options)
    for text, sentence in (
        ('{"format": 2, "stages": [{}]}', "damaged, or no cascade"),
        ('{"format": 2, "stages": [], "prior": null, "made": {}}', "damaged, or no cascade"),
        ('{"format": 1, "stages": []}', "in format 1, not 2"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError, match=sentence):
            Cascade.load(tmp_path / "bad.json", model)


def test_a_cascade_of_the_authors_checkpoint_has_its_own_grid_last(tmp_path):
    torch.save(authors_state(side=16), tmp_path / "authors.pth")
    authors = spot.load(tmp_path / "authors.pth", tokens=16)
    images = torch.randn(2, 3, *authors.img_size)
    cells = len(authors.grid())
    *_, step = Cascade(authors, [Stage(16, 1, threshold=1.0), Stage(cells, 2)])(images)
    assert step.tokens.tolist() == [16 + cells] * 2
    expected = authors(images, authors.grid(images)).log_softmax(1)
    torch.testing.assert_close(step.logits.softmax(1), expected.softmax(1), atol=1e-5, rtol=1e-4)


def test_a_misspelt_model_and_a_confidence_that_is_no_number_get_a_sentence(cascade, images):
    with pytest.raises(InputError, match=r"there is no model 'vit-tii'; did you mean 'vit-ti'"):
        Cascade.load("vit-tii")
    with pytest.raises(InputError, match="has no calibrated cascade"):
        Cascade.load("scenes-a")
    with pytest.raises(InputError, match="until must be float or int or None, got str"):
        next(cascade(images, until="0.8"))
