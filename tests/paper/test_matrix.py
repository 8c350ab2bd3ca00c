import numpy as np
import pytest

from paper.plots import matrix
from spot.errors import InputError

ROWS = [
    {"source": "a", "target": "b", "delta": 7.21, "delta_low": 5.0, "delta_high": 9.4},
    {"source": "b", "target": "a", "delta": -2.5, "delta_low": None, "delta_high": None},
    {"source": "c", "target": "b", "delta": None},
]


def test_a_pair_fills_the_cell_of_its_source_and_target():
    axes = matrix(ROWS).axes[0]
    cells = np.ma.filled(axes.images[0].get_array().astype(float), np.nan)
    np.testing.assert_array_equal(cells, [[np.nan, 7.21], [-2.5, np.nan]])
    names = [[tick.get_text() for tick in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels())]
    assert names == [["a", "b"], ["a", "b"]]


def test_a_cell_tells_value_and_interval():
    axes = matrix(ROWS).axes[0]
    texts = [(text.xy, text.get_text()) for text in axes.texts]
    assert texts == [((1, 0), "+7.2"), ((1, 0), "+5.0 to +9.4"), ((0, 1), "-2.5"), ((0, 1), "")]


def test_no_change_has_the_neutral_colour():
    low, high = matrix(ROWS).axes[0].images[0].get_clim()
    assert low == -high and high > 7.21


def test_no_pairs_are_refused():
    with pytest.raises(InputError, match="at least one pair"):
        matrix([])
