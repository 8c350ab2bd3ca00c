"""The command line as a whole: quick help, one sentence for bad input."""

import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from rich.console import Console

import spot
from spot import report
from spot.cli import VERBS, main


def run(code, *words, **options):
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, **options)


def test_help_lists_every_verb_and_imports_nothing_heavy():
    code = "import sys, spot.cli as c; c.main(['--help']); print({'torch', 'timm', 'tyro', 'rich'} & {*sys.modules})"
    said = run(code, check=True).stdout
    assert all(f"spot {verb}" in said for verb in VERBS)
    assert said.strip().endswith("set()")


@pytest.mark.parametrize("given, policy", [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_waiting_threads_sleep_unless_the_caller_wants_them_to_spin(given, policy):
    """Known before torch is imported, because OpenMP reads it then."""
    code = "import os, spot.cli as c; c.main(['--version']); print(os.environ['OMP_WAIT_POLICY'])"
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    assert run(code, check=True, env=clean | given).stdout.split()[-1] == policy


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example_and_shows_no_none(verb, capsys):
    """An option that is not given is None in Python; a person need not know. Every option has a text."""
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert f"example: spot {verb}" in text
    assert "None" not in text
    assert "(default: )" not in text
    for line, below in pairwise(line.strip("│").rstrip() for line in text.splitlines()):
        if re.fullmatch(r" {1,4}--[a-z]\S+( \S+)*", line):  # an option without a text beside it has it below
            assert re.match(r" {8,}\S", below), line


def test_the_help_lists_every_prior():
    from spot.options import PRIORS

    assert set(PRIORS) == {*spot.PRIORS, "learned"} and len(PRIORS) == len(set(PRIORS))


@pytest.mark.parametrize(
    "words",
    [["predict", "photo.jpg", "--prior"], ["evaluate", "vit-ti", "--data", "x", "--prior", "uniform"],
     ["search", "photo.jpg", "--prior"]],
)  # fmt: skip
def test_a_misspelt_prior_is_answered_before_torch_is_imported(words):
    code = "import sys, spot.cli as c\ntry: c.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    result = run(code, *words, "isotopic")
    assert (result.returncode, result.stdout.strip()) == (2, "False")
    assert result.stderr.count("\n") == 1 and "did you mean 'isotropic'" in result.stderr


def test_an_unknown_verb_is_one_sentence_and_exit_code_two(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["evalute"])
    assert stopped.value.code == 2
    assert "evalute" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("spot ")


# Tables ------------------------------------------------------------------------------------------------


def test_a_wide_table_breaks_between_columns_and_words_never_inside_them(monkeypatch, capsys):
    monkeypatch.setattr(report, "console", Console(width=80))
    names = [f"a-column-that-is-long-{index}" for index in range(6)]
    row = {"backbone": "vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot", **dict.fromkeys(names, 123.456)}
    report.show([row], "a title [with] brackets", caption="and a [/caption]")
    said = capsys.readouterr().out
    assert all(len(line) <= 80 for line in said.splitlines())
    assert all(line.rstrip()[-1] in "┓┃┩│┘" for line in said.splitlines() if line[0] in "┏┃┡│└")  # none is cut
    assert all(name in said for name in names)
    assert said.count("vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot") > 1  # the first column stands in every part
    assert "a title [with] brackets" in said
    assert "[/caption]" in said


def test_title_and_caption_of_a_narrow_table_keep_their_words(monkeypatch, capsys):
    monkeypatch.setattr(report, "console", Console(width=80))
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot"
    report.show([{"x": 1}], f"{name}, stage by stage", caption=f"said by {name}")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == f"{name}, stage by stage"
    assert lines[-1].rstrip() == f"said by {name}"


@pytest.mark.parametrize("verb", ["evaluate", "finetune", "retrofit"])
def test_weights_in_a_file_need_no_network(verb, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = [verb, "vit-ti", "--weights", str(tmp_path / "none.safetensors"), "--data", str(tmp_path)]
    with pytest.raises(SystemExit):
        main([*words, *([] if verb == "evaluate" else ["--out", str(tmp_path / "run")])])
    said = capsys.readouterr().err
    assert "none.safetensors" in said and "cannot be reached" not in said


def test_a_kept_command_names_no_folder_of_this_machine(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["off-grid", "--model", f"vit-ti={tmp_path}/w.safetensors", "--data", str(tmp_path / "here")]
    monkeypatch.setattr("sys.argv", ["paper", *words])
    assert report.command("python -m paper") == "python -m paper off-grid --model vit-ti=../w.safetensors --data ."
    monkeypatch.setattr("sys.argv", ["spot", "evaluate", f"--model=vit-ti={tmp_path}/w.safetensors"])
    assert report.command() == "spot evaluate --model=vit-ti=../w.safetensors"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tyro_prints_the_completion_of_all_verbs(shell, capsys):
    with pytest.raises(SystemExit):
        main(["--tyro-print-completion", shell])
    said = capsys.readouterr().out
    assert all(verb in said for verb in VERBS) and "--objective" in said
