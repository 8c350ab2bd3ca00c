"""The studies of speed, budgets, training and pictures, on small models."""

import json
from dataclasses import replace

import pytest

from paper import elastic, retrofit, speed, timing, tome
from paper.backbone import backbones
from paper.lab import Lab
from paper.settings import StudySettings
from spot.data.images import data_for
from spot.data.loader import loader
from spot.evaluation.accuracy import Setting, evaluate
from spot.evaluation.cost import macs
from spot.models.baselines import BASELINES, ElasticViT, Resize, tome_at_cost
from spot.models.loading import load


@pytest.fixture
def lab(lab):
    lab.backbones = lab.backbones[:1]
    return lab


def test_budgets_are_the_papers_on_its_grid_and_tenths_of_any_other():
    assert elastic.budgets(196) == [39, 59, 78, 98, 118, 137, 157, 176, 196]
    assert elastic.budgets(64) == [13, 19, 26, 32, 38, 45, 51, 58, 64]


def test_elastic_windows_are_read_by_the_retrofitted_weights(lab, small):
    """The row's accuracy is that of an ElasticViT made by hand, over the same images."""
    (backbone,) = lab.backbones
    backbone.__dict__["parent"] = None
    row = next(row for row in elastic.run(lab).rows if row["placement"] == elastic.ELASTIC)
    model = backbone.model
    batches = loader(data_for(model, str(small / "images"), split="val"), 7)
    found = evaluate(model, batches, [Setting(model=ElasticViT(model, row["tokens"]))], shown=False)
    assert row["tokens"] == 3  # a fifth of 16
    assert row["top1"] == pytest.approx(100 * (found.ranks[0] == 0).double().mean().item())


def test_every_row_of_tome_is_of_the_model_it_names(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    rows = tome.run(Lab(backbones(["scenes-b"]), StudySettings(limit=24, tokens=(9, 36, 64)), cache=tmp_path)).rows
    images = data_for(load("scenes-b"), "scenes", split="test", limit=24)
    wanted = {
        tome.MERGED: tome_at_cost(load("scenes-b-grid"), 36),
        tome.MERGED + tome.SAME: tome_at_cost(load("scenes-b"), 36),
        tome.FLOORED: BASELINES["tome-floor"].build(load("scenes-b-grid"), 36),
        tome.SMALLER + tome.SAME: Resize(load("scenes-b"), 36),
        tome.MOST: tome_at_cost(load("scenes-b-grid"), 9),
    }
    for name, model in wanted.items():
        row = next(row for row in rows if name in (row["setting"], row["method"] * (row["setting"] == "as 36 tokens")))
        alone = evaluate(load("scenes-b"), loader(images), [Setting(name="alone", model=model)], shown=False).rows()[0]
        assert row["top1"] == pytest.approx(alone["top1"]), name


def test_tome_costs_as_much_as_the_budget_it_meets(lab):
    (backbone,) = lab.backbones
    lab.settings = replace(lab.settings, tokens=(4, 13))  # of 16; two blocks that merge half cost more than 4 tokens
    result = tome.run(lab)
    rows = {(row["method"], row["setting"]): row for row in result.rows}
    merged, placed = rows[tome.MERGED, "as 13 tokens"], rows[tome.SPOT, "13 tokens"]
    assert merged["GMACs"] == pytest.approx(macs(tome_at_cost(backbone.model, 13)) / 1e9)
    assert merged["MAC ratio"] == pytest.approx(rows[tome.VIT, "dense"]["GMACs"] / merged["GMACs"])
    assert merged["versus"] == pytest.approx(placed["top1"] - merged["top1"])
    assert merged["GMACs"] == pytest.approx(placed["GMACs"], rel=0.06)
    most = rows[tome.MERGED, tome.MOST]
    assert most["GMACs"] > 1.06 * rows[tome.SPOT, "4 tokens"]["GMACs"] and "versus" not in most
    assert placed["delta"] == pytest.approx(placed["top1"] - rows[tome.SPOT, "dense"]["top1"])
    assert any("published" in note for note in result.notes)


def test_half_the_tokens_of_vit_b16_cost_half_the_multiply_adds():
    """By hand: 12 blocks of 12 D² weights, 2 T² D of attention, and the patches' projection."""
    cost = {n: 12 * ((n + 1) * 12 * 768**2 + 2 * (n + 1) ** 2 * 768) + n * 768 * 768 for n in (100, 196)}
    assert tome.paper_mac_ratio() == pytest.approx(cost[196] / cost[100], rel=0.01)


def test_the_gap_is_from_spot_to_the_oracle_on_the_same_images(lab):
    rows = speed.run(lab).rows
    methods = [speed.VIT, speed.SMALL, speed.SPOT, speed.ORACLE]
    assert [row["method"] for row in rows] == methods * 2  # with no plain weights there are no others
    assert all(row["batch"] == 2 for row in rows)
    for plain, small, placed, searched in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True):
        assert plain["delta"] == pytest.approx(plain["top1"] - placed["top1"])
        assert small["delta"] == pytest.approx(small["top1"] - placed["top1"])
        assert searched["images"] == 30 and placed["images"] == 60
        assert searched["speed-up"] == placed["speed-up"]
        assert placed["single_low"] <= placed["single"] <= placed["single_high"]  # one image at a time


def test_reading_windows_is_counted_by_the_papers_formula(lab):
    rows = [row for row in speed.run(lab).rows if row["method"] == speed.SPOT]
    assert [row["formula"] for row in rows] == [tokens * 64 * (7 * 3 + 8) for tokens in (4, 9)]  # windows of 8 × 8
    paper = next(row for row in speed.paper_rows() if row["method"] == speed.SPOT)
    assert (paper["tokens"], paper["formula"]) == (25, 185_600)
    assert paper["formula_share"] < 0.01


LOG = """epoch,loss,train_top1,val_25,lr
1.0,2.0,,10.0,1e-3
2.0,1.0,50.0,30.0,1e-4
3.0,0.9,60.0,32.5,1e-5
"""


def test_retrofit_reads_the_logs_of_runs(make_lab, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.csv").write_text(LOG)
    (run / "run.json").write_text(json.dumps({"settings": {"recipe": {"name": "distil"}}}))
    result = retrofit.run(make_lab(["one"], runs=[run]))
    assert result.rows[0] == {"run": "run, distil", "epoch": 1.0, "loss": 2.0, "val_25": 10.0}
    assert result.rows[2]["train_top1"] == 60.0
    assert "10.0 % at epoch 1, 30.0 at 2, 32.5 at 3; the last 1 epochs change it by +2.5" in result.notes[-1]
    (axes,) = retrofit.draw(result).axes
    assert [line.get_label() for line in axes.lines] == ["train", "val, 25 tokens"]


def test_a_small_run_on_scenes_has_intervals_and_begins_with_the_grid_model(tmp_path, monkeypatch):
    monkeypatch.setattr(retrofit, "CHANGES", {"epochs": 2.0, "warmup_epochs": 0.1, "batch_size": 8})
    monkeypatch.setattr(retrofit, "SCENES", 8)
    monkeypatch.setattr(retrofit, "VALIDATED", 32)
    lab = Lab(backbones(["scenes-a"]), StudySettings(limit=32), cache=tmp_path)
    result = retrofit.run(lab)
    assert [row["epoch"] for row in result.rows] == [0, 1, 2]
    assert all(row["val_25_low"] <= row["val_25"] <= row["val_25_high"] for row in result.rows)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert retrofit.run(lab).rows == result.rows  # from the folder, without training again
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files


def test_the_papers_lines_of_speed_are_those_of_its_figure():
    assert speed.paper_accuracies()["best", speed.SPOT] == [62.83, 76.84, 82.76, 85.15]
    assert speed.paper_accuracies()["best", speed.ORACLE] == [90.93, 94.87, 96.09, 96.24]
