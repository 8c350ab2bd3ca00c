"""Bars stand where their group and name say, as high as their value."""

import pytest
from matplotlib.patches import Rectangle

from paper.plots import grouped_bars, wrapped
from spot.errors import InputError

ROWS = [
    {"backbone": "a", "prior": "uniform", "top1": 40.0, "low": 35.0, "high": 46.0},
    {"backbone": "a", "prior": "center", "top1": 50.0, "low": 45.0, "high": 55.0},
    {"backbone": "b", "prior": "uniform", "top1": -10.0, "low": -12.0, "high": -9.0},
    {"backbone": "b", "prior": "center", "top1": None},
]
COLUMNS = {"group": "backbone", "bar": "prior", "value": "top1", "low": "low", "high": "high"}


def bars(axes):
    return [(round(each.get_x() + each.get_width() / 2, 2), each.get_height()) for each in axes.patches]


def test_each_bar_stands_in_its_group_as_high_as_its_value_with_its_interval():
    (axes,) = grouped_bars(ROWS, **COLUMNS).axes
    # Two bars share 0.84 of a group's room: their middles are 0.21 left and right of the group's. One stands in it.
    assert bars(axes) == [(-0.21, 40.0), (0.21, 50.0), (1.0, -10.0)]
    assert all(isinstance(each, Rectangle) for each in axes.patches)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a", "b"]
    assert [text.get_text() for text in axes.texts] == ["40.0", "50.0", "-10.0"]
    spans = [each.get_segments()[0][:, 1].tolist() for each in axes.collections]
    assert spans == [pytest.approx(span) for span in ([35, 46], [45, 55], [-12, -9])]


def test_panels_have_their_own_rows_only():
    first, second = grouped_bars(ROWS, group="prior", bar="prior", value="top1", panel="backbone").axes
    assert (first.get_title(), second.get_title()) == ("a", "b")
    assert [height for _, height in bars(first)] == [40.0, 50.0]
    assert [height for _, height in bars(second)] == [-10.0]


@pytest.mark.parametrize("rows", [[], [ROWS[3]]])
def test_no_values_are_refused(rows):
    with pytest.raises(InputError, match="at least one row"):
        grouped_bars(rows, **COLUMNS)


@pytest.mark.parametrize(
    "name, letters, expected",
    [
        ("vit_tiny_patch16_224+spot", 30, "vit_tiny_patch16_224+spot"),
        ("vit_tiny_patch16_224+spot", 18, "vit_tiny_patch16_\n224+spot"),
        ("vit_tiny_patch16_224+spot", 14, "vit_tiny_\npatch16_224\n+spot"),
        ("incomprehensible", 8, "incomprehensible"),
        ("49 (paper 50)", 8, "49\n(paper\n50)"),
    ],
)
def test_names_break_between_words_and_never_in_one(name, letters, expected):
    assert wrapped(name, letters) == expected
