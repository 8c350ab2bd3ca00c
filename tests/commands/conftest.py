"""A saved model, and commands that are refused."""

import pytest

from spot.cli import main


@pytest.fixture
def model(nano, tmp_path):
    """The folder of a saved nano model, with ten unnamed classes."""
    nano.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def refused(capsys):
    """Run a command with bad input, and return its one sentence."""

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        assert stopped.value.code == 2
        sentence = capsys.readouterr().err.strip()
        assert sentence.startswith("spot: ") and "\n" not in sentence
        return sentence

    return run
