"""A saved model, commands with their results, and commands that are refused."""

import json

import pytest

from spot.cli import main
from tests.conftest import write_noise


@pytest.fixture
def model(nano, tmp_path):
    """The folder of a saved nano model, with ten unnamed classes."""
    nano.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def images(tmp_path):
    """Twenty images in ten class folders."""
    return write_noise(tmp_path / "images", 20)


def command(*words: object) -> None:
    main([str(word) for word in words])


@pytest.fixture
def results(tmp_path):
    """Run a command, and return the rows and settings of its JSON file."""

    def run(*words: object) -> tuple[list[dict], dict]:
        command(*words, "--json", tmp_path / "results.json")
        written = json.loads((tmp_path / "results.json").read_text())
        return written["rows"], written["settings"]

    return run


@pytest.fixture
def refused(capsys):
    """Run a command with bad input, and return its one sentence."""

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            command(*words)
        assert stopped.value.code == 2
        sentence = capsys.readouterr().err.strip()
        assert sentence.startswith("spot: ") and "\n" not in sentence
        return sentence

    return run
