"""What figures share."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from spot.errors import InputError
from spot.plots import check_ending, save
from spot.plots.accuracy import accuracy
from spot.plots.layout import colours_of, columns_of, panels, wrapped


def test_a_figure_is_saved_whole_or_not_at_all(tmp_path):
    save(Figure(), tmp_path / "new" / "a.PNG")
    assert (tmp_path / "new" / "a.PNG").read_bytes().startswith(b"\x89PNG")
    save(Figure(), tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    for act in (check_ending, lambda path: save(Figure(), path)):
        with pytest.raises(InputError, match=r"a picture can be .*png.*, got .*a\.docx"):
            act(tmp_path / "a.docx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pdf", "new"]


def test_names_from_outside_are_never_formulas(tmp_path):
    """As mathtext the first would lose its $, and the second would not parse at all."""
    rows = [{"placement": name, "tokens": 25, "top1": 1.0} for name in ("a $x$ b", r"$\nothing{$")]
    figure = accuracy(rows, title=r"cost: $5 \frac$ .jpg")
    save(figure, tmp_path / "a.png")
    texts = [text for text in figure.findobj(Text) if "$" in text.get_text()]
    assert len(texts) == 3
    assert not any(text.get_parse_math() for text in texts)


@pytest.mark.parametrize(
    "count, columns", [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 3), (7, 4), (8, 4), (9, 3), (10, 5)]
)
def test_panels_stand_in_rows_that_lack_one_at_most(count, columns):
    assert columns_of(count) == columns
    figure, grid, spare = panels(count)
    assert len(grid) == count and all(axes.axison for axes in grid)
    assert len({axes.get_subplotspec().rowspan.start for axes in grid}) == -(-count // columns)
    assert len(figure.axes) == count + (spare is not None) and (spare is None or not spare.axison)


def test_up_to_twelve_colours_differ():
    assert len({to_hex(colour) for colour in colours_of([str(index) for index in range(12)]).values()}) == 12


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
