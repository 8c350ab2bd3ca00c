"""What figures share."""

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from spot.errors import InputError
from spot.plots import check_ending, save
from spot.plots.accuracy import accuracy


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
