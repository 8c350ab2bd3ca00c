"""The command line as a whole: quick help, one sentence for bad input."""

import subprocess
import sys
import time

import pytest

from spot.cli import VERBS, main


def test_help_lists_every_verb_in_under_a_second():
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-m", "spot", "--help"], capture_output=True, text=True)
    elapsed = time.perf_counter() - start
    assert result.returncode == 0
    assert all(f"spot {verb}" in result.stdout for verb in VERBS)
    assert elapsed < 3  # 0.1 s where nothing else runs; importing torch alone would take longer than this


def test_help_imports_nothing_heavy():
    code = "import sys, spot.cli as c; c.main(['--help']); print({'torch', 'timm', 'tyro', 'rich'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("set()")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "example:" in text


def test_an_unknown_verb_is_one_sentence_and_exit_code_two(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["evalute"])
    assert stopped.value.code == 2
    assert "evalute" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("spot ")
