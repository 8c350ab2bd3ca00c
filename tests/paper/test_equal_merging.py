"""A smaller image that is merged: the control of windows that are merged."""

import json
from types import SimpleNamespace

import pytest
import torch

from paper import equal_merging
from paper.equal_merging import SmallerMerged, affordable
from paper.equal_training import FIRST
from spot.models.merging import price
from spot.models.resize import Resize
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from tests.conftest import make_nano

IMAGES = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def model_of(depth: int = 12) -> SpotViT:
    return make_nano(depth=depth, img_size=64)


@torch.no_grad()
def test_a_smaller_image_is_shrunk_and_then_merged():
    model = model_of()
    merged = SmallerMerged(model, 25)
    assert merged.starting_tokens == 36 and sum(merged.schedule()) > 0
    small = torch.nn.functional.interpolate(IMAGES, (48, 48), mode="bicubic", antialias=True)  # 6 patches of 8 a side
    expected = ToMe(model.at(tokens=36), r=merged.schedule(), own_placement=True)(
        small, Resize(model, 36).place(IMAGES)
    )
    torch.testing.assert_close(merged(IMAGES), expected)
    assert (merged(IMAGES) - Resize(model, 36)(IMAGES)).abs().max() > 1e-4  # merging makes a difference


@pytest.mark.parametrize("tokens", [9, 16, 25, 36])
def test_a_smaller_image_that_merges_costs_no_more_than_its_budget(tokens):
    model = model_of()
    count, schedule = affordable(model, tokens)
    assert count >= tokens and price(model, count, schedule) <= price(model, tokens, [0] * 12)


def test_the_table_compares_what_is_treated_alike(tmp_path, monkeypatch):
    """Both are the same model here, so windows differ from a smaller image by how they are shown alone."""
    model = model_of()
    monkeypatch.setattr(equal_merging.spot, "load", lambda *_: model)
    monkeypatch.setattr(equal_merging, "trained", lambda way, *_: tmp_path / way)
    monkeypatch.setattr(equal_merging, "data_for", lambda *_: None)
    monkeypatch.setattr(equal_merging, "loader", lambda _: None)
    asked = []

    outcome = [torch.arange(40) >= 20, torch.arange(40) >= 30]  # ranks: as taught 20 of 40 are first, merged 30
    result = SimpleNamespace(ranks=[each.long() for each in outcome])
    monkeypatch.setattr(equal_merging, "evaluate", lambda *given: asked.append(given[2]) or result)
    for way in (FIRST, equal_merging.SMALLER):
        (tmp_path / way).mkdir()
    (tmp_path / "nano.safetensors").write_bytes(b"weights")
    equal_merging.main(tmp_path, tmp_path, tmp_path, tmp_path, out=tmp_path, name="nano", budgets=(25,))
    rows = json.loads((tmp_path / "equal-merging.json").read_text())["rows"]
    assert [row["top-1"] for row in rows] == ["50.0", "50.0", "75.0", "75.0"]
    assert [row["tokens at first"] for row in rows][:2] == [25, 25] and rows[3]["tokens at first"] == 36
    merged = SmallerMerged(model, 25).schedule()
    assert rows[3]["merged in blocks"] == ", ".join(f"{block}: {n}" for block, n in enumerate(merged) if n)
    assert rows[3]["gain of merging"].startswith("+25.0") and rows[3]["smaller image − windows"].startswith("+0.0")
    assert len(asked) == 2 and len(asked[0]) == 2
    equal_merging.main(tmp_path, tmp_path, tmp_path, tmp_path, out=tmp_path, name="nano", budgets=(25,))
    assert len(asked) == 2  # what was measured is kept
