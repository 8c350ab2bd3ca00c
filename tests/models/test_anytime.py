"""Few tokens first, more for images that need them."""

import copy
from itertools import product

import pytest
import torch

import spot
from spot.data.images import data_for
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.anytime import Said, calibrate, cheapest, fitted, listen, measure, possible_stages, thresholds
from spot.evaluation.cost import macs
from spot.models.anytime import Cascade, Stage, load_cascade
from spot.models.protocol import Placed
from spot.models.tome import ToMe
from spot.placement.policy import hash_of


@pytest.fixture(scope="module")
def batches():
    return list(loader(data_for(spot.load("scenes-a"), "scenes", limit=96), 48))


@pytest.fixture(scope="module")
def model(batches):
    model = spot.load("scenes-a")
    model.cascade = calibrate(model, batches, budgets=(9, 16, 25), agree=0.97, merge=False)
    return model


@pytest.fixture
def images(batches):
    return batches[0].images


def by_hand(model, image, until=None):
    """One image, stage by stage, in the plainest way."""
    known, tokens, cost = None, 0, 0
    for number, stage in enumerate(model.cascade.stages):
        last = number + 1 == len(model.cascade.stages)
        positions = model.grid(image) if last else model.place(image, tokens=stage.tokens)
        said = model(image, positions).log_softmax(1)
        known = stage.own * said if known is None else stage.own * said + stage.earlier * known
        tokens, cost = tokens + positions.shape[1], cost + stage.macs
        if last or known.softmax(1).max() >= (stage.threshold if until is None else until):
            return known[0], tokens, cost


@pytest.mark.parametrize("until", [None, 0.6, 1.0])
def test_a_batch_that_shrinks_says_what_each_image_alone_does(model, images, until):
    with torch.no_grad():
        *before, step = model.look(images, until)
        for row in range(len(images)):
            logits, tokens, cost = by_hand(model, images[row : row + 1], until)
            torch.testing.assert_close(step.logits[row], logits, rtol=1e-4, atol=1e-4)
            assert (int(step.tokens[row]), int(step.macs[row])) == (tokens, cost)
    assert step.done.all()
    rows = [len(each.rows) for each in (*before, step)]
    assert rows == sorted(rows, reverse=True)
    assert all(
        int((~each.done).sum()) == len(after.rows) for each, after in zip(before, [*before[1:], step], strict=True)
    )


def test_costs_are_those_of_the_counter(model):
    for stage in model.cascade.stages[:-1]:
        assert stage.macs == macs(Placed(model, stage.tokens))
    assert model.cascade.stages[-1].macs == macs(Placed(model, len(model.grid()), "isotropic"))


def test_thresholds_are_the_cheapest_of_all(batches):
    draw = torch.Generator().manual_seed(0)
    confidences = [torch.rand(60, generator=draw) for _ in range(3)]
    agrees = [
        torch.rand(60, generator=draw) < share for share in (confidences[0], confidences[1] ** 0.5, torch.ones(60))
    ]
    found = thresholds(confidences, [each.float() for each in agrees], [1, 2, 5], 0.9)
    limits, cost = found.limits, found.macs
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
    assert fitted(own, earlier, dense) == pytest.approx((1.7, 0.4), abs=1e-4)
    assert fitted(own, None, (2.5 * own).log_softmax(1)) == pytest.approx((2.5, 0.0), abs=1e-4)


def test_a_cascade_agrees_as_often_as_was_asked_for_where_it_was_calibrated(model, batches):
    said = listen(model, batches, [Stage(9, 1), Stage(64, 2)], mirror=True)
    made = model.cascade.made
    both = [images for batch in batches for images in (batch.images, batch.images.flip(-1))]
    with torch.no_grad():
        ends = [list(model.look(images))[-1] for images in both]
        full = torch.cat([model(images, model.grid(images)) for images in both])
    torch.testing.assert_close(said.dense, full.log_softmax(1), rtol=1e-4, atol=1e-4)
    assert made["images"] == 96 and len(said.keys) == len(said.labels) == 192
    answers = torch.cat([step.logits.argmax(1) for step in ends])
    agreed = (answers == said.dense.argmax(1)).float().mean().item()
    assert agreed == pytest.approx(made["agreed"])
    assert agreed >= made["agree"] - 1e-6
    spent = torch.cat([step.macs for step in ends]).double().mean() / model.cascade.stages[-1].macs
    assert spent == pytest.approx(made["macs"], rel=1e-4) and spent < 1


def test_without_a_sure_early_stage_only_the_grid_is_left():
    wrong = torch.zeros(40, 3).log_softmax(1)
    dense = torch.eye(3)[torch.arange(40) % 3].mul(9).log_softmax(1)
    said = Said(torch.stack([wrong, dense]), dense, torch.zeros(40))
    chosen = cheapest(said, [Stage(9, 1), Stage(64, 10)], agree=1.0)
    assert ([stage.tokens for stage in chosen.stages], chosen.agreed, chosen.macs) == ([64], 1.0, 10)


def test_what_is_lost_is_what_the_dense_vit_expects():
    # Three images, which the dense ViT gives 0.9 / 0.1, 0.6 / 0.4 and 0.52 / 0.48; few tokens err on the second.
    dense = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.52, 0.48]]).log()
    few = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.52, 0.48]]).log()
    said = Said(torch.stack([few, dense]), dense, torch.zeros(3))
    sparing = cheapest(said, [Stage(9, 1), Stage(64, 10)], lose=0.07)  # 0.2 / 3 is lost if all stop early
    assert [stage.tokens for stage in sparing.stages] == [9, 64] and sparing.macs == 1
    assert sparing.lost == pytest.approx(0.2 / 3) and sparing.agreed == pytest.approx(2 / 3)
    careful = cheapest(said, [Stage(9, 1), Stage(64, 10)], lose=0.06)
    assert careful.lost == pytest.approx(0, abs=1e-6) and careful.macs > 1


def test_stages_may_merge(model, images, batches):
    stages = possible_stages(model, (16,))
    # Six blocks: early stages merge from the third on, 2 or 3 in each of four; the grid's 64 from the second to fourth.
    by_hand = [
        (16, ()), (16, (0, 0, 2, 2, 2, 2)), (16, (0, 0, 3, 3, 3, 3)),
        (64, ()), (64, (0, 0, 11, 11, 11, 11)), (64, (0, 0, 10, 10, 10, 10)), (64, (0, 0, 13, 13, 13, 12)),
        (64, (0, 10, 10, 10, 10, 10)),
    ]  # fmt: skip
    assert sorted((each.tokens, each.merged) for each in stages) == sorted(by_hand)
    few = model.place(images[:4], tokens=16)
    for stage in stages:
        if stage.merged and stage.tokens == 64:
            assert stage.macs == macs(ToMe(model, r=stage.merged)) < macs(Placed(model, 64))
        elif stage.merged:
            saved = sum(ToMe(model, r=0).macs(16)) - sum(ToMe(model, r=stage.merged).macs(16))
            assert stage.macs == macs(Placed(model, 16)) - saved < macs(Placed(model, 16))
    own = copy.copy(model)
    own.cascade = Cascade((Stage(16, 1, 2.0, merged=(0, 0, 3, 3, 3, 3)), Stage(64, 2, merged=(3,) * 6)), hash_of(own))
    with torch.no_grad():
        first, last = own.look(images[:4])
        torch.testing.assert_close(first.logits, ToMe(model, r=[0, 0, 3, 3, 3, 3])(images[:4], few).log_softmax(1))
        torch.testing.assert_close(last.logits, ToMe(model, r=3)(images[:4]).log_softmax(1))
    torch.testing.assert_close(first.positions, few)
    merging = calibrate(model, batches, budgets=(9, 16, 25), lose=0.02)
    plain = calibrate(model, batches, budgets=(9, 16, 25), lose=0.02, merge=False)
    assert merging.made["macs"] <= plain.made["macs"] and max(merging.made["lost"], plain.made["lost"]) <= 0.02


def test_a_stage_that_merges_has_the_weights_and_the_prior_of_its_tokens(images):
    model = spot.load("scenes-a")
    model.base, model.fewest = (lambda: spot.load("scenes-a-grid")), 4
    model.cascade = Cascade((Stage(16, 1, 0.0, merged=(0, 0, 3, 3, 3, 3)),) * 2, hash_of(model), prior="center")
    first = next(model.look(images[:4]))
    places = model.place(images[:4], tokens=16, prior="center")
    expected = ToMe(model.suited(16), r=[0, 0, 3, 3, 3, 3])(images[:4], places).log_softmax(1)
    torch.testing.assert_close(first.logits, expected)
    torch.testing.assert_close(first.positions, places)
    assert model.tokens == 64 and model.prior == "isotropic"  # left as they were


def test_with_a_limit_of_cost_as_little_is_lost_as_that_allows():
    # Two images of three stop early at no loss, the third loses 0.2 where it does: 1 costs 10 more than stopping.
    dense = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.52, 0.48]]).log()
    few = torch.tensor([[0.9, 0.1], [0.45, 0.55], [0.52, 0.48]]).log()
    said = Said(torch.stack([few, dense]), dense, torch.zeros(3))
    stages = [Stage(9, 1), Stage(64, 10)]
    assert cheapest(said, stages, cost=1.0).lost == pytest.approx(0, abs=1e-6)
    tight = cheapest(said, stages, cost=0.2)
    assert tight.macs == 1 and tight.lost == pytest.approx(0.2 / 3)
    some = cheapest(said, stages, cost=0.8)  # one image may go on, which is not the one that would gain
    assert some.macs <= 8 and some.lost <= tight.lost
    with pytest.raises(InputError, match="begin with fewer tokens"):
        cheapest(said, stages, cost=0.05)


def test_measure_is_the_mean_over_images(model, batches):
    row = measure(model, batches, until=0.6)
    right = tokens = 0
    with torch.no_grad():
        for batch in batches:
            for image, label in zip(batch.images, batch.labels, strict=True):
                logits, count, _ = by_hand(model, image[None], 0.6)
                right, tokens = right + int(logits.argmax() == label), tokens + count
    assert row["top1"] == pytest.approx(100 * right / 96)
    assert row["tokens"] == pytest.approx(tokens / 96, abs=0.06)
    assert sum(row["stopped"].values()) == pytest.approx(1, abs=1e-3)


def test_a_calibration_is_kept_with_its_model(model, images, tmp_path):
    model.save_pretrained(tmp_path / "model")
    again = spot.load(tmp_path / "model")
    assert again.cascade == model.cascade
    model.cascade.save(tmp_path / "other.anytime.json")
    with pytest.raises(InputError, match="calibrated for another model"):
        load_cascade(tmp_path / "other.anytime.json", spot.load("scenes-b"))


def test_bad_input_is_one_sentence(model, images, batches, tmp_path):
    with pytest.raises(InputError, match="never calibrated"):
        next(spot.load("scenes-a").look(images))
    with pytest.raises(InputError, match="until is a confidence"):
        next(model.look(images, until=80))
    with pytest.raises(InputError, match="agree is a share"):
        calibrate(model, batches, agree=99)
    with pytest.raises(InputError, match="above 0 and at most 1, got 65"):
        calibrate(model, batches, cost=65)
    with pytest.raises(InputError, match="not both"):
        calibrate(model, batches, cost=0.5, agree=0.9)
    with pytest.raises(InputError, match="is one point"):
        calibrate(model, batches, lose=1)
    with pytest.raises(InputError, match="below the grid's 64 tokens"):
        calibrate(model, batches, budgets=(64,))
    with pytest.raises(InputError, match="does not know the ViT"):
        calibrate(model, batches, base=True, budgets=(9,))
    (tmp_path / "bad.json").write_text('{"format": 1, "stages": [{}]}')
    with pytest.raises(InputError, match="damaged, or no calibration"):
        load_cascade(tmp_path / "bad.json", model)


def test_calibrations_of_version_0_2_are_still_read(model, tmp_path):
    Cascade((Stage(9, 1, 0.5), Stage(64, 2)), hash_of(model)).save(tmp_path / "new.json")
    text = (tmp_path / "new.json").read_text().replace('"merged": []', '"merged": 0', 1).replace("[]", "3")
    (tmp_path / "old.json").write_text(text)
    assert [stage.merged for stage in load_cascade(tmp_path / "old.json", model).stages] == [(), (3,) * 6]


def test_the_last_stage_may_be_the_base(model, images):
    own = copy.deepcopy(model)
    own.base = lambda: spot.load("scenes-a-grid")
    own.cascade = Cascade((Stage(9, 1, 2.0), Stage(64, 2, 0.0)), hash_of(own), base=True)
    with torch.no_grad():
        *_, step = own.look(images[:4])
        expected = spot.load("scenes-a-grid")(images[:4], own.grid(images[:4])).log_softmax(1)
    torch.testing.assert_close(step.logits, expected)
