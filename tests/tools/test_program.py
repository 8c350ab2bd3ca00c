"""How the programs of tools/ begin and end."""

import sys
from pathlib import Path

import pytest

from spot.errors import InputError
from tools.program import program


def started(monkeypatch, *words, fails=None):
    """What a program that needs two folders is called with, when these words follow its name."""
    called = []

    def main(*folders):
        called.extend(folders)
        if fails is not None:
            raise fails

    monkeypatch.setattr(sys, "argv", ["program", *words])
    program("copies", "what it does", main, needed=2, runs="runs/copies")
    return called


def test_the_folder_for_runs_may_be_left_out(monkeypatch):
    assert started(monkeypatch, "a", "b") == [Path("a"), Path("b"), Path("runs/copies")]
    assert started(monkeypatch, "a", "b", "c") == [Path("a"), Path("b"), Path("c")]


@pytest.mark.parametrize("words", [(), ("a",), ("a", "b", "c", "d"), ("-h",), ("--help", "b")])
def test_other_words_get_the_description(monkeypatch, words):
    with pytest.raises(SystemExit, match="what it does"):
        started(monkeypatch, *words)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (InputError("no images"), "copies: no images"),
        (OSError("disk full"), "copies: disk full"),
        (KeyboardInterrupt(), "copies: stopped; what was finished is kept"),
    ],
)
def test_a_failure_is_one_sentence(monkeypatch, error, sentence):
    with pytest.raises(SystemExit, match=sentence):
        started(monkeypatch, "a", "b", fails=error)


def test_a_mistake_of_the_program_is_not_hidden(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        started(monkeypatch, "a", "b", fails=ZeroDivisionError())
