"""The notebooks run from top to bottom on the built-in model, and print what their text says."""

import json
import re
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def cells(path):
    """The code cells of a notebook."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def run(monkeypatch):
    """What the cells of a notebook print or show, in this process: a kernel would import everything anew."""
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from traitlets.config import Config

    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which a shell takes the place of
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))

    def execute(path):
        with capture_output() as shown:
            for cell in cells(path):
                shell.run_cell("".join(cell["source"])).raise_error()
        return shown.stdout + "".join(map(str, shown.outputs))

    return execute


def test_there_are_three_and_they_are_kept_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["deploy", "place-and-search", "retrofit-your-vit"]
    assert not any(cell["outputs"] for path in NOTEBOOKS for cell in cells(path))


def test_placing_and_searching(run):
    said = run(NOTEBOOKS[1])
    before, after = (int(re.search(rf"{when} (\d+)%", said)[1]) for when in ("before", "after"))
    assert after > before  # the oracle knows the label
    assert "Figure" in said


def test_retrofitting(run):
    said = run(NOTEBOOKS[2])
    assert float(re.search(r"on the grid: (\S+)", said)[1]) < 1e-4
    assert "model.safetensors" in said


def test_deploying(run):
    said = run(NOTEBOOKS[0])
    assert "differs from the model in logits by at most" in said
    assert "['images']" in said
    assert float(re.search(r"largest difference: (\S+)", said)[1]) < 1e-4
