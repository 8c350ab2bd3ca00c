"""Each study on two small models: its rows, the paper's, and its figure from the file alone."""

import json
from pathlib import Path

import pytest
import torch

from paper import classification, off_grid, priors, robustness, saliency_gain, transfer
from paper.saliency_gain import score
from paper.statistics import predicted
from paper.study import STUDIES, Result, find_study, with_counts
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.placement.files import Placements
from tests.conftest import random_policy

ELSEWHERE = ("needle", "anytime", "retrofit")  # studies with a test file of their own, and the logs of training
PAPER = Path(__file__).parents[3] / "shared" / "paper" / "spot.tex"


@pytest.mark.parametrize("name", [name for name in STUDIES if name not in ELSEWHERE])
def test_a_study_is_written_and_redrawn_from_its_file(name, lab, tmp_path):
    study = find_study(name)
    assert study.name == name
    result = study.run(lab)
    result.save(tmp_path / "a.json")
    again = Result.load(tmp_path / "a.json")
    assert (again.rows, again.paper, again.notes) == (result.rows, result.paper, result.notes)
    assert study.draw(again).axes
    page = study.markdown(again)
    assert "paper" in page and "50,000" in page
    for row in again.rows:  # every accuracy has its interval and its number of images
        if "top1" in row:
            assert row["low"] <= row["top1"] <= row["high"] and row["images"] in (30, 60)
        if "speed-up" in row:
            assert row["speed_low"] <= row["speed-up"] <= row["speed_high"]


def test_the_subpixel_gain_is_the_difference_of_its_rows(lab):
    rows = off_grid.run(lab).rows
    top1 = {(row["backbone"], row["placement"], row.get("steps")): row["top1"] for row in rows}
    gains = [row for row in rows if "delta" in row]
    assert len(gains) == 12
    for row in gains:
        over = off_grid.TRIALS if row["placement"] == off_grid.FREE_TRIALS else off_grid.GRID
        assert row["delta"] == pytest.approx(row["top1"] - top1[row["backbone"], over, row["steps"]])


def test_searched_tokens_are_moved_at_random_to_the_grid_as_in_any_direction(lab):
    rows = [row for row in off_grid.run(lab).rows if "moved" in row]
    moved = {(row["backbone"], row["steps"], row["placement"]): row["moved"] for row in rows}
    for (backbone, steps, name), pixels in moved.items():
        if name == off_grid.MOVED:
            assert pixels == pytest.approx(moved[backbone, steps, off_grid.GRID], rel=0.02)
        if name in off_grid.JITTERS:  # the mean distance of two uniform coordinates
            assert pixels == pytest.approx(0.765 * off_grid.JITTERS[name], rel=0.15)
    assert {row["passes"] for row in off_grid.run(lab).rows if "passes" in row} == {12, 23}


def test_transfer_is_for_all_ordered_pairs_and_adds_what_the_table_says(lab):
    rows = transfer.run(lab).rows
    assert {(row["source"], row["target"]) for row in rows} == {("one", "two"), ("two", "one")}
    for row in rows:
        assert row["delta"] == pytest.approx(row["transfer"] - row["original"])
        assert row["excess"] == pytest.approx(row["transfer"] - row["another"])
    lab.backbones = lab.backbones[:1]
    with pytest.raises(InputError, match="at least two"):
        transfer.run(lab)


def test_classification_says_what_it_lacks(lab, make_lab, shared_cache):
    result = classification.run(lab)
    assert any("plain ViT" in note for note in result.notes)  # the small models were saved without a parent
    assert not any("bank" in note and "need" in note for note in result.notes)
    lines = {*classification.PRIORS, *classification.SAME, classification.ORACLE}
    assert {row["placement"] for row in result.rows} == lines
    same = [row for row in result.rows if row["placement"] == classification.SAME_DROPOUT]
    assert [(row["tokens"], row["seeds"]) for row in same] == [(4, 5), (9, 5)] * 2
    without = classification.run(make_lab(bank=None, cache=shared_cache))
    assert any("--bank DIR" in note for note in without.notes)
    assert [row["top1"] for row in without.rows] == [row["top1"] for row in result.rows]


def test_drops_are_differences_on_the_same_images(lab):
    rows = robustness.run(lab).rows
    for name in ("one", "two"):
        own = {row["placement"]: row for row in rows if row["backbone"] == name}
        assert own["background"]["drop"] == pytest.approx(own["isotropic"]["top1"] - own["background"]["top1"])
        found = lab.oracle(next(each for each in lab.backbones if each.name == name), objective="ascent")
        lost = predicted(found, 0).right.double().mean() - predicted(found).right.double().mean()
        assert own["ascent"]["drop"] == pytest.approx(100 * lost.item())


def test_the_papers_slips_are_named_with_the_right_figures():
    (text,) = robustness.slips()
    for printed, right in (("6.85", "6.05"), ("27.82", "27.62"), ("33.52", "30.84")):
        assert f"{printed} is printed" in text and f"= {right}" in text
    assert text.count("is printed") == 3
    drops = [row["drop"] for row in robustness.paper_rows() if "drop" in row]
    assert {6.05, 27.62} <= set(drops)
    assert 30.84 not in drops  # 33.52 − 2.68: an accuracy minus how often a wrong label is predicted


def test_saliency_gain_is_that_of_the_positions_scores(lab):
    backbone = lab.backbones[0]
    found = lab.oracle(backbone, tokens=4)
    gains = saliency_gain.measured(lab, backbone, found)
    data = lab.sources.images(backbone.model, oracle=True)
    for number in (0, 7, 29):
        image, _, key = data[data.keys.index(found.keys[number])]
        maps = lab.sources.saliency(backbone.model)(image[None], [key])
        start, end = (score(maps, found.positions_for([key], step), 8)[0] for step in (0, -1))
        assert gains["token"][number].item() == pytest.approx(((end - start) / start).mean().item(), rel=1e-4)
        assert gains["image"][number].item() == pytest.approx((end.sum() / start.sum() - 1).item(), rel=1e-3)


def test_the_control_of_the_saliency_gain_moves_as_another_image(lab):
    """With the same movement in every image, the control is the search itself, up to the image's edge."""
    backbone = lab.backbones[0]
    keys = lab.sources.images(backbone.model, oracle=True).keys
    start = 0.3 + 0.4 * torch.rand(len(keys), 4, 2, generator=torch.Generator().manual_seed(0))
    moved = Placements(list(keys), torch.stack([start, start + torch.tensor([0.05, -0.1])], 1))
    gains = saliency_gain.measured(lab, backbone, moved)
    torch.testing.assert_close(gains["token"], gains["token_control"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "module", [off_grid, transfer, saliency_gain, classification], ids=lambda each: each.STUDY.name
)
def test_a_study_takes_models_whose_windows_have_a_scale(module, make_lab):
    lab = make_lab(tokens=(4,), limit=20, oracle_limit=20, seeds=1)
    for backbone in lab.backbones:
        backbone.model.scale = "auto"
    rows = module.run(lab).rows
    if module is classification:
        same, fixed = ({row["backbone"]: row for row in rows if row["placement"] == name} for name in
                       (classification.SAME_DROPOUT, classification.FIXED))  # fmt: skip
        for name, row in same.items():
            assert row["delta"] == pytest.approx(row["top1"] - fixed[name]["top1"])


@pytest.mark.parametrize("module, column", [(priors, "prior"), (classification, "placement")])
def test_a_models_own_policy_has_a_row_with_the_cost_of_looking(module, column, make_lab):
    lab = make_lab(tokens=(4,), limit=20, oracle_limit=20, seeds=1)
    first, second = lab.backbones
    first.model.policy = random_policy(first.model, side=8)
    rows = [row for row in module.run(lab).rows if row["tokens"] == 4]
    learned = [row for row in rows if row[column] == "learned"]
    assert [row["backbone"] for row in learned] == [first.name] != [second.name]
    (even,) = (row for row in rows if row["backbone"] == first.name and row[column] == "isotropic")
    look = macs(first.model.at(tokens=4, prior="learned")) - macs(first.model.at(tokens=4, prior="isotropic"))
    assert learned[0]["GMACs"] - even["GMACs"] == pytest.approx(look / 1e9) and look > 0


def test_a_result_with_other_fields_or_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "priors.json"
    Result([{"a": 1}]).save(path)
    content = json.loads(path.read_text())
    for text in ("{", "[]", json.dumps({**content, "more": 1})):
        path.write_text(text)
        with pytest.raises(InputError, match="damaged"):
            Result.load(path)
    with pytest.raises(InputError, match="no result"):
        Result.load(tmp_path / "none.json")


def test_a_line_on_fewer_images_says_on_how_many_it_is():
    rows = [{"placement": "isotropic", "images": 2000}, {"placement": "oracle", "images": 300}, {"placement": "none"}]
    result = Result(rows, [{"placement": "oracle", "images": 50_000}])
    names = [row["placement"] for row in with_counts(result, "placement")]
    assert names == ["isotropic", "oracle (ours: 300 images)", "none", "oracle (ours: 300 images)"]
    assert with_counts(Result(rows), "placement")[1]["placement"] == "oracle (300 images)"
    assert with_counts(Result(rows[1:2]), "placement")[0]["placement"] == "oracle"
