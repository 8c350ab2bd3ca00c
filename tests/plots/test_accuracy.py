"""A figure of accuracy has a line per placement, whatever table it comes from."""

import pytest

from spot.errors import InputError
from spot.plots.accuracy import accuracy, apart, throughput

ROWS = [
    {"placement": "isotropic", "tokens": 49, "gmacs": 0.29, "top1": 32.0, "low": 30.0, "high": 34.0},
    {"placement": "isotropic", "tokens": 25, "gmacs": 0.15, "top1": 3.0, "low": 2.0, "high": 4.0},
    {"placement": "center", "tokens": 25, "gmacs": 0.15, "top1": 5.0, "low": 4.0, "high": 6.0},
]
VIT = {"placement": "vit", "tokens": 49, "gmacs": 1.25, "top1": 76.0, "low": 74.0, "high": 78.0}


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def names(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_a_line_has_its_points_by_budget_and_whiskers_their_intervals():
    (axes,) = accuracy(ROWS, across="tokens").axes
    drawn = lines(axes)
    assert drawn["isotropic"].get_xydata().tolist() == [[25, 3], [49, 32]]  # whatever the order of rows
    assert drawn["center"].get_xydata().tolist() == [[25, 5]]
    spans = [bar.get_segments()[0][:, 1].tolist() for bar in axes.collections]
    assert spans == [[2, 4], [30, 34], [4, 6]]


def test_where_a_budget_has_one_cost_its_tick_tells_it():
    (axes,) = accuracy(ROWS).axes
    assert (
        axes.get_xlabel() == "tokens\nmultiply-adds per image, in billions" and axes.get_ylabel() == "top-1 accuracy, %"
    )
    formatter = axes.xaxis.get_major_formatter()
    assert [formatter(tick, 0) for tick in axes.get_xticks()] == ["25\n0.15", "49\n0.29"]


def test_where_methods_of_one_budget_cost_differently_each_cost_has_a_panel():
    tokens, cost = accuracy([VIT, *ROWS]).axes
    assert (tokens.get_xlabel(), cost.get_xlabel()) == ("tokens", "multiply-adds per image, in billions")
    assert lines(tokens)["vit"].get_xydata().tolist() == [[49, 76]]
    assert lines(cost)["vit"].get_xydata().tolist() == [[1.25, 76]]
    assert cost.get_xlim()[1] < 10 < tokens.get_xlim()[1]  # on axes of their own


def test_without_top1_the_vote_of_neighbours_is_drawn_without_an_interval():
    (axes,) = accuracy([{"placement": "center", "tokens": 25, "knn": 40.0, "low": 1.0, "high": 2.0}]).axes
    assert axes.get_ylabel() == "kNN accuracy, %"
    assert lines(axes)["center"].get_xydata().tolist() == [[25, 40]]
    assert not axes.collections


def test_the_legend_goes_from_the_best_with_few_tokens_to_the_worst():
    assert names(accuracy(ROWS)) == ["center", "isotropic"]  # 5 % and 3 % at 25 tokens


def test_twelve_lines_differ_in_colour_and_in_marker():
    rows = [{"placement": f"p{each}", "tokens": n, "top1": each + n} for each in range(12) for n in (1, 2)]
    (axes,) = accuracy(rows).axes
    drawn = lines(axes).values()
    assert len({line.get_color() for line in drawn}) == len({line.get_marker() for line in drawn}) == 12


@pytest.mark.parametrize("backbones", ["ab", "abcde"])
def test_panels_show_their_own_rows_beside_one_legend(backbones):
    rows = [{**row, "backbone": each, "top1": row["top1"] + ord(each)} for each in backbones for row in ROWS]
    figure = accuracy(rows, across="tokens", panel="backbone")
    assert [axes.get_title() for axes in figure.axes] == list(backbones)
    assert [lines(axes)["center"].get_ydata().tolist() for axes in figure.axes] == [
        [5 + ord(each)] for each in backbones
    ]
    assert sorted(names(figure)) == ["center", "isotropic"]


def test_a_table_without_accuracy_is_refused():
    for rows in ([{"placement": "center", "tokens": 25}], []):
        with pytest.raises(InputError, match="top1 or knn"):
            accuracy(rows)


def test_ticks_are_not_printed_over_each_other():
    assert apart([1.25, 1.26, 1.5, 2.0]) == [1.25, 2.0]


def test_large_numbers_on_the_axis_have_no_exponent():
    rows = [{**row, "cost": cost} for row, cost in zip(ROWS, (100, 11.6, 1578.4), strict=True)]
    (axes,) = accuracy(rows, across="cost").axes
    shown = [axes.xaxis.get_major_formatter()(tick, 0) for tick in (11.6, 100, 1578.4)]
    assert shown == ["11.6", "100", "1,578"]


def test_throughput_has_a_panel_per_batch_size_a_line_per_method_and_the_diagonal():
    rows = [{"method": "vit", "batch": batch, "budget": 196, "MAC ratio": 1.0, "speed-up": 1.0} for batch in (16, 1)]
    rows += [
        {"method": "spot", "batch": batch, "budget": budget, "MAC ratio": ratio, "speed-up": ratio - batch / 100}
        for batch in (16, 1)
        for budget, ratio in ((25, 8.0), (49, 4.0))
    ]
    one, many = throughput(rows, "bench").axes
    assert (one.get_title(), many.get_title()) == ("batch 1", "batch 16")
    vit, spot, diagonal = (line.get_xydata().tolist() for line in many.lines)
    assert diagonal == [[1, 1], [8, 8]] and vit == [[1, 1]]
    assert spot == [[4, 3.84], [8, 7.84]]
    assert [text.get_text() for text in many.texts] == ["49", "25"]
    assert [tick.get_text() for tick in many.get_xticklabels()] == ["1×", "2×", "4×", "8×"]
