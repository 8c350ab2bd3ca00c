"""A figure of accuracy takes any table of spot evaluate."""

import pytest
from PIL import Image

from spot.errors import InputError
from spot.plots.accuracy import accuracy, accuracy_lines, apart, check_ending

ROWS = [
    {"placement": "vit", "tokens": 196, "gmacs": 1.25, "top1": 76.0, "low": 74.0, "high": 78.0},
    {"placement": "isotropic", "tokens": 49, "gmacs": 0.29, "top1": 32.0, "low": 30.0, "high": 34.0},
    {"placement": "isotropic", "tokens": 25, "gmacs": 0.15, "top1": 3.0, "low": 2.0, "high": 4.0},
]


def test_with_costs_there_are_two_panels(tmp_path):
    accuracy(ROWS, tmp_path / "both.png", title="both")
    fewer = [{name: value for name, value in row.items() if name != "gmacs"} for row in ROWS]
    accuracy(fewer, tmp_path / "one.png")
    both, one = (Image.open(tmp_path / f"{name}.png") for name in ("both", "one"))
    assert both.height == one.height
    assert both.width > 1.5 * one.width


def test_without_top1_neighbours_votes_are_drawn(tmp_path):
    accuracy([{"placement": "center", "tokens": 25, "knn": 40.0}], tmp_path / "knn.png")
    assert (tmp_path / "knn.png").is_file()


def test_a_table_without_accuracy_and_an_unknown_kind_of_picture_are_refused(tmp_path):
    with pytest.raises(InputError, match="top1 or knn"):
        accuracy([{"placement": "center", "tokens": 25}], tmp_path / "a.png")
    with pytest.raises(InputError, match="top1 or knn"):
        accuracy([], tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a picture can be .*png.*, got a\.docx"):
        check_ending("a.docx")


def test_ticks_are_not_printed_over_each_other():
    assert apart([1.25, 1.26, 1.3, 2.0], ratio=1.1) == [1.25, 2.0]


LINES = [
    {"backbone": "a", "placement": "isotropic", "tokens": 49, "top1": 32.0, "low": 30.0, "high": 34.0},
    {"backbone": "a", "placement": "isotropic", "tokens": 25, "top1": 3.0, "low": 2.0, "high": 4.0},
    {"backbone": "b", "placement": "center", "tokens": 25, "top1": 5.0},
]
PAPER = [{"backbone": "a", "placement": "isotropic", "tokens": 25, "top1": 46.85}]


def test_lines_of_ours_are_whole_and_the_paper_s_dashed_in_the_same_colour():
    (axes,) = accuracy_lines(LINES, PAPER).axes
    found = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert set(found) == {"isotropic", "center", "isotropic, the paper"}
    ours, theirs = found["isotropic"], found["isotropic, the paper"]
    assert ours.get_xydata().tolist() == [[25, 3], [49, 32]]  # by budget, whatever the order of rows
    assert theirs.get_xydata().tolist() == [[25, 46.85]]
    assert (ours.get_linestyle(), theirs.get_linestyle()) == ("-", "--")
    assert ours.get_color() == theirs.get_color() != found["center"].get_color()


def test_a_panel_shows_its_own_rows_and_whiskers_their_intervals():
    first, second = accuracy_lines(LINES, PAPER, panel="backbone").axes
    assert [line.get_label() for line in second.lines] == ["center"]
    assert [segment[:, 1].tolist() for segment in first.collections[0].get_segments()] == [[2, 4], [30, 34]]
    with pytest.raises(InputError, match="at least one row"):
        accuracy_lines([])
