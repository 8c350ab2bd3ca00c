"""The dense control of the study `needle`."""

import pytest

import spot
from paper.needle_control import main
from spot.store import read_json


def test_a_control_with_the_shipped_weights_equals_the_shipped_model(tmp_path):
    spot.load("scenes-needle").save_pretrained(tmp_path / "same")
    main(tmp_path / "same", tmp_path / "same", limit=20, sizes=(128,), out=tmp_path)
    placed, mixed, dense, learned, grid = read_json(tmp_path / "needle-control.json")["rows"]
    assert [row["tokens"] for row in (placed, mixed, dense, learned, grid)] == [64, 256, 256, 64, 256]
    assert mixed["top1"] == dense["top1"] == grid["top1"] and placed["top1"] == learned["top1"]
    assert grid["gmacs"] > 3 * learned["gmacs"]
    assert learned["delta"] == 0 and dense["delta"] == pytest.approx(placed["top1"] - dense["top1"])
    assert "| 128 × 128 | all dense, 200 steps | dense grid | 256 |" in (tmp_path / "needle-control.md").read_text()
