"""The notebooks run from top to bottom on the built-in model, and say what their text says."""

import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def run(path):
    """What the cells of a notebook print or show, as text, by cell; an error in a cell is raised."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    said = []
    for cell in book.cells:
        parts = [part.get("text") or part.get("data", {}).get("text/plain", "") for part in cell.get("outputs", [])]
        said.append("".join(parts))
    return said


def test_there_are_three_and_they_are_kept_without_outputs():
    nbformat = pytest.importorskip("nbformat")
    assert [path.stem for path in NOTEBOOKS] == ["deploy", "place-and-search", "retrofit-your-vit"]
    for path in NOTEBOOKS:
        assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)


def test_placing_and_searching():
    said = "".join(run(NOTEBOOKS[1]))
    before, after = (int(re.search(rf"{when} (\d+)%", said)[1]) for when in ("before", "after"))
    assert after > before  # the oracle knows the label
    assert "Figure" in said


def test_retrofitting():
    said = run(NOTEBOOKS[2])
    difference = float(re.search(r"on the grid: (\S+)", "".join(said))[1])
    assert difference < 1e-4
    assert "model.safetensors" in "".join(said)


def test_deploying():
    said = "".join(run(NOTEBOOKS[0]))
    assert "differs from the model in logits by at most" in said
    assert "['images']" in said
    assert float(re.search(r"largest difference: (\S+)", said)[1]) < 1e-4
