"""The study of stopping when sure."""

import pytest
import torch

from paper import anytime
from paper.study import find_study
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.early_exit import choose_cascade
from tests.conftest import random_policy


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(anytime, "LOSSES", (0.01, 0.1))
    monkeypatch.setattr(anytime, "ROUNDS", 1)
    monkeypatch.setattr(anytime, "TIMED", 8)


def test_every_row_has_its_cost_and_cascades_are_timed(make_lab):
    lab = make_lab(models=("one",))
    model = lab.backbones[0].model
    model.policy = random_policy(model, side=8)
    result = anytime.run(lab)
    methods = [row["method"] for row in result.rows]
    assert methods.count("dense ViT") == 1 and methods.count("one budget") == 3 and methods.count("merging") >= 2
    assert all(methods.count(name) == 2 for name, *_ in anytime.CASCADES)
    assert all(0 < row["share"] <= 2 for row in result.rows)
    rows = {(row["method"], row.get("lose")): row for row in result.rows}
    learned, even = rows["cascade, learned placement", 1], rows["cascade", 1]
    assert {"time 1", "time 32"} <= learned.keys() & even.keys() and learned["share"] != even["share"]
    text = find_study("anytime").markdown(result)
    assert "CF-ViT" in text and "0.33" in text  # 1.53 of 4.6 G
    find_study("anytime").draw(result)


@pytest.mark.parametrize("prior", [None, "learned"])
def test_where_images_stop_is_what_the_cascade_itself_does(make_lab, prior):
    lab = make_lab(models=("one",))
    backbone = lab.backbones[0]
    backbone.model.policy = random_policy(backbone.model, side=8)
    every, here, there = anytime.predictions(lab, backbone, [4, 9], prior)
    stages = choose_cascade(there, every, agree=0.8).stages
    right, spent, _ = anytime.cascade_outcome(here, stages, every)
    cascade = anytime.cascade_of(backbone, stages, prior)
    (batch,) = loader(lab.sources.images(backbone.model), 64)
    with torch.no_grad():
        *_, step = cascade(batch.images)
    order = sorted(range(60), key=batch.keys.__getitem__)
    assert (step.macs[order] == spent).float().mean() > 0.95  # kept as float16, a border case may differ
    assert ((step.logits.argmax(1) == batch.labels)[order] == right).float().mean() > 0.95


def test_without_images_to_calibrate_on_it_is_refused(make_lab):
    with pytest.raises(InputError, match="--bank"):
        anytime.run(make_lab(models=("one",), bank=None))


def test_models_and_parents_are_left_as_they_were_for_the_studies_that_follow(make_lab):
    lab = make_lab()
    first, second = lab.backbones
    first.__dict__["parent"] = second.model  # as if it had been retrofitted from the second
    lab.backbones = [first]
    rows = anytime.run(lab).rows
    grid = next(row for row in rows if row["method"] == "one budget" and row["tokens"] == "16")
    assert grid["delta"] == 0  # the last stage is the parent
    assert all(weight.requires_grad for weight in second.model.parameters())
