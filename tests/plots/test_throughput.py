import pytest

from spot.errors import InputError
from spot.plots.accuracy import throughput

ROWS = [
    {"method": "vit", "batch": batch, "budget": 196, "MAC ratio": 1.0, "speed-up": 1.0} for batch in (16, 1)
] + [
    {"method": "spot", "batch": batch, "budget": budget, "MAC ratio": ratio, "speed-up": ratio - batch / 100}
    for batch in (16, 1)
    for budget, ratio in ((25, 8.0), (49, 4.0))
]  # fmt: skip


def test_a_batch_size_has_a_panel_with_a_line_per_method_and_the_diagonal():
    one, many = throughput(ROWS, "bench").axes
    assert (one.get_title(), many.get_title()) == ("batch 1", "batch 16")
    vit, spot, diagonal = (line.get_xydata().tolist() for line in many.lines)
    assert diagonal == [[1, 1], [8, 8]] and vit == [[1, 1]]
    assert spot == [[4, 3.84], [8, 7.84]]
    assert [text.get_text() for text in many.texts] == ["49", "25"]
    assert [tick.get_text() for tick in many.get_xticklabels()] == ["1×", "2×", "4×", "8×"]


def test_no_rows_are_refused():
    with pytest.raises(InputError, match="at least one row"):
        throughput([])
