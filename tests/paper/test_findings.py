"""Results: yes on the paper's own numbers, no on their opposite, open where intervals are wide or results missing."""

import copy

import numpy as np
import pytest
from scipy.stats import norm

from paper import classification, off_grid, robustness, saliency_gain, transfer
from paper.findings import ALPHA, CLAIMS, NO, OPEN, YES, Check, findings, holm, markdown, more, read, slight
from paper.study import Result
from spot.errors import InputError


def around(name, value, half):
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def as_measured(half=0.4):
    """The paper's own rows, as if we had measured them, with intervals of half a width, and controls that agree."""
    rows = [{**row, **(around("delta", row["delta"], half) if "delta" in row else {})} for row in off_grid.PAPER]
    rows += [{"placement": off_grid.MOVED, "steps": 5, **around("delta", 20.0, half)}]
    rows += [{"placement": off_grid.FREE_TRIALS, "passes": 12, **around("delta", 20.0, half)}]
    results = {"off-grid": [{"backbone": "m", **row} for row in rows]}
    table = classification.paper_rows()
    base = {(row["backbone"], row["tokens"]): row["top1"] for row in table if row["placement"] == "isotropic"}
    results["classification"] = [
        {**row, **around("delta", row["top1"] - base[row["backbone"], row["tokens"]], half)} for row in table
    ]
    same = [row for row in results["classification"] if row["placement"] == classification.DROPOUT]
    results["classification"] += [{**row, "placement": classification.SAME_DROPOUT} for row in same]
    small = half / 2 if half < 1 else half
    results["saliency-gain"] = [{**row, **around("excess", row["rsg"], small)} for row in saliency_gain.paper_rows()]
    results["transfer"] = [
        {**row, **around("delta", row["delta"], half), **around("excess", row["delta"], half)}
        for row in transfer.paper_rows()
    ]
    results["robustness"] = [
        {**row, **around("drop", row["drop"], half)} if "drop" in row else row for row in robustness.paper_rows()
    ]
    return {name: Result(rows) for name, rows in results.items()}


def holds(results):
    return {row["claim"]: row["holds"] for row in findings(results).rows}


def test_the_papers_findings_hold_on_the_papers_numbers():
    assert holds(as_measured()) == dict.fromkeys(CLAIMS, YES)


def turn(results, study, name):
    """The same study with the opposite outcome."""
    changed = copy.deepcopy(results)
    for row in changed[study].rows:
        if name in row:
            row |= around(name, -row[name], row[name] - row[f"{name}_low"])
    return changed


@pytest.mark.parametrize(
    "study, name, refuted",
    [
        ("off-grid", "delta", {"finding 1"}),
        ("classification", "delta", {"finding 1", "finding 2"}),
        ("transfer", "excess", {"finding 4"}),
        ("saliency-gain", "excess", {"finding 3"}),
        ("robustness", "drop", {"robustness"}),
    ],
)
def test_the_opposite_outcome_is_a_no(study, name, refuted):
    said = holds(turn(as_measured(), study, name))
    assert {claim for claim, result in said.items() if result == NO} == refuted
    assert {claim for claim, result in said.items() if result == YES} == set(CLAIMS) - refuted


def test_what_the_papers_design_shows_is_told_and_decides_nothing():
    """As on photographs: a great fall on the grid, and the same fall after any other move of that length."""
    results = as_measured()
    for row in results["off-grid"].rows:
        if row["placement"] in (off_grid.MOVED, off_grid.FREE_TRIALS):
            row |= around("delta", 0.0, 0.5)
    made = findings(results)
    assert (made.rows[0]["holds"], made.rows[0]["the paper's design says"]) == (NO, YES)
    results["transfer"].rows = [{**row, **around("delta", -3.0, 1.0)} for row in results["transfer"].rows]
    row = next(row for row in findings(results).rows if row["claim"] == "finding 4")
    assert (row["holds"], row["the paper's design says"]) == (YES, NO)
    assert "no (the paper's design)" in markdown(findings(results))


def test_wide_intervals_decide_nothing():
    assert holds(as_measured(half=60)) == dict.fromkeys(CLAIMS, OPEN)


def test_a_missing_study_leaves_its_finding_open_but_can_still_refute():
    results = as_measured()
    del results["classification"], results["transfer"]
    said = holds(results)
    assert said["finding 1"] == said["finding 2"] == said["finding 4"] == OPEN
    assert said["robustness"] == YES
    assert holds(turn(results, "off-grid", "delta"))["finding 1"] == NO
    assert "classification (missing)" in findings(results).rows[0]["rests on"]


@pytest.mark.parametrize(
    "value, low, high, least, result",
    [
        (3, 1, 5, 1, YES),
        (3, -1, 7, 1, OPEN),
        (-3, -5, -1, 1, NO),
        (0.2, 0.1, 0.3, 1, NO),  # surely more, and surely not substantially
        (0.2, 0.1, 0.3, 0, YES),
        (0.8, 0.1, 1.5, 1, OPEN),
        (0, 0, 0, 0, NO),
    ],
)
def test_more_needs_its_interval_on_one_side(value, low, high, least, result):
    assert more("x", value, low, high, least=least).result == result


@pytest.mark.parametrize(
    "low, high, result", [(-1, 2, OPEN), (0.1, 0.6, YES), (6, 9, NO), (-9, -6, NO), (3, 9, OPEN), (-9, 9, OPEN)]
)
def test_slight_is_an_effect_and_a_small_one(low, high, result):
    assert slight("x", (low + high) / 2, low, high).result == result


def test_p_against_is_the_normal_tail_that_the_interval_has():
    """An interval that ends at 0 has p = 0.025; one whose end is twice as far, 1.96 · 2 standard errors."""
    assert more("x", -1.0, -2.0, 0.0).against == pytest.approx(ALPHA)
    assert more("x", -2.0, -3.0, -1.0).against == pytest.approx(norm.sf(2 * norm.isf(0.025)))
    assert slight("x", 7.0, 5.0, 9.0).against == pytest.approx(ALPHA)


def test_a_no_passes_holms_correction_by_hand():
    """Of p = 0.004, 0.010, 0.012, 0.5 the first is below 0.025 / 4, and the second is not below 0.025 / 3."""
    checks = [Check("x", -1, -2, 0, NO if p < 0.025 else OPEN, p) for p in (0.012, 0.004, 0.5, 0.010)]
    assert [each.result for each in holm(checks)] == [OPEN, NO, OPEN, OPEN]
    assert [each.result for each in holm(checks[1:2])] == [NO]
    assert [each.result for each in holm([Check("x", 1, 0.5, 2, YES)] * 3)] == [YES] * 3


def test_chance_alone_refutes_a_true_claim_no_more_often_than_one_check_would():
    draw = np.random.default_rng(0)
    refuted = before = 0
    for _ in range(2000):
        checks = [more("x", value, value - 1.96, value + 1.96) for value in draw.normal(0.0, 1.0, 15)]
        before += any(each.result == NO for each in checks)
        refuted += any(each.result == NO for each in holm(checks))
    assert before / 2000 == pytest.approx(1 - 0.975**15, abs=0.03)  # a third of all true claims
    assert refuted / 2000 < 0.035


def test_findings_are_read_from_a_folder_of_results(tmp_path):
    with pytest.raises(InputError, match="run python -m paper all first"):
        read(tmp_path)
    for name, result in as_measured().items():
        result.save(tmp_path / f"{name}.json")
    result = read(tmp_path)
    assert [row["holds"] for row in result.rows] == [YES] * 5
    assert "| +16.9 | +16.5 to +17.3 | 1 | yes (the paper's design) |" in markdown(result)
    (tmp_path / "transfer.json").write_text("{}")
    with pytest.raises(InputError, match="transfer"):
        read(tmp_path)
