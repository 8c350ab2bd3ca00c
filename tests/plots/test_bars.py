"""Bars stand where their group and name say, as high as their value."""

import pytest
from matplotlib.patches import Rectangle

from spot.errors import InputError
from spot.plots.bars import distinct, grouped_bars
from spot.plots.palette import palette

ROWS = [
    {"backbone": "a", "prior": "uniform", "top1": 40.0, "low": 35.0, "high": 46.0, "paper": 44.05},
    {"backbone": "a", "prior": "center", "top1": 50.0, "low": 45.0, "high": 55.0, "paper": None},
    {"backbone": "b", "prior": "uniform", "top1": -10.0, "low": -12.0, "high": -9.0, "paper": 29.87},
    {"backbone": "b", "prior": "center", "top1": None},
]
COLUMNS = {"group": "backbone", "bar": "prior", "value": "top1", "low": "low", "high": "high", "paper": "paper"}


def bars(axes):
    return [(round(each.get_x() + each.get_width() / 2, 2), each.get_height()) for each in axes.patches]


def test_each_bar_stands_in_its_group_as_high_as_its_value():
    (axes,) = grouped_bars(ROWS, **COLUMNS).axes
    # Two bars share 0.84 of a group's room: their middles are 0.21 left and right of the group's.
    assert bars(axes) == [(-0.21, 40.0), (0.21, 50.0), (0.79, -10.0)]
    assert all(isinstance(each, Rectangle) for each in axes.patches)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a", "b"]
    assert [text.get_text() for text in axes.texts] == ["40.0", "50.0", "-10.0"]


def test_whiskers_are_the_interval_and_diamonds_the_paper():
    (axes,) = grouped_bars(ROWS, **COLUMNS).axes
    spans = [each.get_segments()[0][:, 1].tolist() for each in axes.collections]
    assert spans == [pytest.approx(span) for span in ([35, 46], [45, 55], [-12, -9])]
    marks = [line.get_xydata()[0].round(2).tolist() for line in axes.lines if line.get_marker() == "D"]
    assert marks == [[-0.21, 44.05], [0.79, 29.87]]


def test_panels_have_their_own_rows_only():
    first, second = grouped_bars(ROWS, group="prior", bar="prior", value="top1", panel="backbone").axes
    assert (first.get_title(), second.get_title()) == ("a", "b")
    assert [height for _, height in bars(first)] == [40.0, 50.0]
    assert [height for _, height in bars(second)] == [-10.0]


def test_the_legend_names_the_paper_only_where_it_has_values():
    def legend(**changes):
        (found,) = grouped_bars(ROWS, **{**COLUMNS, **changes}).legends
        return [text.get_text() for text in found.get_texts()]

    assert legend() == ["uniform", "center", "the paper"]
    assert legend(paper=None) == ["uniform", "center"]


def test_no_rows_are_refused_and_names_keep_their_order():
    with pytest.raises(InputError, match="at least one row"):
        grouped_bars([], **COLUMNS)
    assert distinct(ROWS, "prior") == ["uniform", "center"]


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_up_to_twenty_colours_differ(count):
    assert len(set(palette(count))) == count
