import pytest
from matplotlib.figure import Figure

from spot.plots.panels import columns_of, panels_of


@pytest.mark.parametrize("count, columns", [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (7, 3)])
def test_panels_stand_in_rows(count, columns):
    assert columns_of(count) == columns
    found = panels_of(Figure(), count)
    assert len(found) == count and all(axes.get_visible() for axes in found)
    rows = {axes.get_subplotspec().rowspan.start for axes in found}
    assert len(rows) == -(-count // columns)
