import pytest

from paper.plots import CEILING, GAP, edge, trade_off
from spot.errors import InputError

ROWS = [
    {"method": "SPoT", "tokens": 16, "speed-up": 4.0, "top1": 70.0, "low": 65.0, "high": 75.0},
    {"method": "SPoT", "tokens": 64, "speed-up": 1.0, "top1": 90.0},
    {"method": "SPoT-ON", "tokens": 16, "speed-up": 4.0, "top1": 95.0},
]


def test_lines_run_from_slow_to_fast_and_numbers_say_the_tokens():
    (axes,) = trade_off(ROWS, oracle="SPoT-ON", reached="SPoT").axes
    spot, oracle = (line.get_xydata().tolist() for line in axes.lines if not line.get_label().startswith("_"))
    assert (spot, oracle) == ([[1, 90], [4, 70]], [[4, 95]])
    assert [text.get_text() for text in axes.texts] == ["64", "16", "ceiling", "gap"]
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 4.16), (60, 102))


def test_the_ceiling_lies_above_the_oracle_and_the_gap_below_it():
    from matplotlib.colors import to_hex

    (axes,) = trade_off(ROWS, oracle="SPoT-ON", reached="SPoT").axes
    areas = [
        (to_hex(each.get_facecolor()[0]), each.get_paths()[0].vertices[:, 1])
        for each in axes.collections
        if len(each.get_facecolor())
    ]
    (above, ceiling), (between, gap), (below, _) = areas
    assert (above, between, below) == (CEILING, GAP, "#ffffff")
    assert (ceiling.min(), gap.max()) == (95, 95)


def test_a_curve_goes_on_level_to_both_sides():
    assert edge(ROWS[:2][::-1], 5.0) == ([0, 1, 4, 5], [90, 90, 70, 70])


def test_no_rows_are_refused():
    with pytest.raises(InputError, match="needs rows"):
        trade_off([])
