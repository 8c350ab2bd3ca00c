"""The study of window sizes."""

import pytest
import torch

from paper import scale
from paper.study import find_study
from spot.placement.files import Placements


def test_every_budget_has_five_scales_and_auto_and_searches_with_and_without(make_lab):
    lab = make_lab(models=("one",))
    result = scale.run(lab)
    plain = [row for row in result.rows if "scale" in row]
    assert [(row["tokens"], round(row["scale"], 3)) for row in plain] == [
        *((4, each) for each in (1, 1.189, 1.414, 1.682, 2)),
        *((9, each) for each in (1, 1.075, 1.155, 1.241, 1.333)),
        *((4, 1.625), (9, 1.286)),  # auto
    ]
    first, second = plain[:2]
    assert "delta" not in first and second["delta"] == pytest.approx(second["top1"] - first["top1"])
    fixed, free = (row for row in result.rows if row["size"].startswith("searched"))
    assert free["delta"] == pytest.approx(free["top1"] - fixed["top1"])
    assert lab.oracle(lab.backbones[0], scale="auto").trajectory.shape[-1] == 3
    text = find_study("scale").markdown(result)
    assert "in the median" in text and "4" in text


def test_what_a_search_wants_is_told_from_its_ends():
    first = torch.tensor([[0.5, 0.5, 2.0], [0.05, 0.5, 2.0], [0.5, 0.95, 1.0], [0.4, 0.5, 1.0]])
    last = first.clone()
    last[:, 2] *= torch.tensor([1.2, 0.5, 1.0, 1.4])
    row = scale.wanted(Placements(["a"], torch.stack([first, last])[None]))
    assert row["grew"] == 50 and row["shrank"] == 25
    assert row["ratio_middle"] == pytest.approx(1.3) and row["ratio_edge"] == pytest.approx(0.75)
    assert sum(row["histogram"]) == pytest.approx(100) and len(row["histogram"]) == len(row["edges"]) + 1
