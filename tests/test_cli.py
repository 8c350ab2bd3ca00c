"""The command line as a whole: quick help, one sentence for bad input."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest
from rich.console import Console

from spot import report
from spot.cli import VERBS, as_options, main


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


@pytest.mark.parametrize("given, policy", [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_waiting_threads_sleep_unless_the_caller_wants_them_to_spin(given, policy):
    """Known before torch is imported, because OpenMP reads it then."""
    code = "import os, spot.cli as c; c.main(['--version']); print(os.environ['OMP_WAIT_POLICY'])"
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | given)
    assert result.stdout.split()[-1] == policy


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


# Completion --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("completion") / "spot.sh"
    printed = subprocess.run([sys.executable, "-m", "spot", "completion", "bash"], capture_output=True, check=True)
    file.write_bytes(printed.stdout)
    return file


@pytest.mark.parametrize(
    "typed, offered",
    [
        ("spot ev", ["evaluate"]),
        ("spot evaluate scenes-m", ["scenes-mae"]),
        ("spot evaluate vit", ["vit-ti"]),
        ("spot predict photo.jpg --model deit-", ["deit-ti"]),
        ("spot predict photo.jpg --prior fo", ["focus"]),
        ("spot evaluate scenes-a --prior center iso", ["isotropic"]),
        ("spot search x.jpg --obj", ["--objective"]),
        ("spot search x.jpg --objective ag", ["agree"]),
        ("spot retrofit scenes-a --recipe dis", ["distil"]),
        ("spot study sal", ["saliency-gain"]),
    ],
)
def test_the_shell_completes(script, typed, offered):
    words = typed.split(" ")
    code = f'source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _spot; echo "${{COMPREPLY[@]}}"'
    said = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(offered) <= set(said)
    assert all(word.startswith(words[-1]) for word in said)


def in_zsh(script, typed):
    """What a line becomes in an interactive zsh when Tab is pressed at its end."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"PS1": "READY> ", "TERM": "dumb"}
        os.execvp("zsh", ["zsh", "-f", "-i"])

    def read(until):
        said, end = "", time.monotonic() + 60
        while until not in said and time.monotonic() < end:
            if select.select([terminal], [], [], 0.5)[0]:
                said += os.read(terminal, 4096).decode(errors="replace")
        return said

    read("READY> ")
    os.write(terminal, f"autoload -U compinit; compinit -u -D; source {script}; print LOA''DED\n".encode())
    read("LOADED")
    read("READY> ")
    widget = "shown() { print; print -r -- \"<$BUFFER>\"; }; zle -N shown; bindkey '^G' shown\n"
    os.write(terminal, widget.encode())
    read("READY> ")
    os.write(terminal, typed.encode() + b"\t\x07")
    said = read(">\r\n")
    os.close(terminal)
    os.waitpid(process, 0)
    return re.findall(r"<(spot .*?)>", said)[-1]


@pytest.mark.parametrize(
    "typed, whole",
    [
        ("spot eva", "spot evaluate "),
        ("spot predict photo.jpg --model deit-", "spot predict photo.jpg --model deit-ti "),
        ("spot predict photo.jpg --prior foc", "spot predict photo.jpg --prior focus "),
    ],
)
def test_zsh_completes(tmp_path, capsys, typed, whole):
    if shutil.which("zsh") is None:
        pytest.skip("no zsh is installed (apt-get install zsh); bash is tested")
    main(["completion", "zsh"])
    file = tmp_path / "spot.zsh"
    file.write_text(capsys.readouterr().out)
    assert in_zsh(file, typed) == whole


# Sentences ---------------------------------------------------------------------------------------------


def test_errors_name_options_as_the_command_line_does():
    names = {"weights", "data_root", "skip_unreadable"}
    assert as_options("pass weights=FILE if you have them", names) == "pass --weights FILE if you have them"
    assert as_options("got data_root='x', too", names) == "got --data-root 'x', too"
    assert as_options("pass unreadable='skip' to go on", names) == "pass --skip-unreadable to go on"
    assert as_options("x was made with weights='0'; got length=3", names) == "x was made with weights='0'; got length=3"


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


def test_a_timm_name_without_network_ends_before_torch_is_imported(tmp_path):
    where = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "TORCH_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    program = (
        "import sys\nfrom spot.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    print(stop.code, 'torch' in sys.modules)"
    )
    name = "vit_base_patch16_224.augreg2_in21k_ft_in1k"
    words = [sys.executable, "-c", program, "predict", "photo.jpg", "--model", name]
    said = subprocess.run(words, env=where, capture_output=True, text=True, check=True)
    assert said.stdout == "2 False\n"
    assert said.stderr == (
        f"spot: cannot download {name}: huggingface.co cannot be reached; pass --weights FILE if you have them\n"
    )
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    (tmp_path / "hub" / "checkpoints" / "vit.pth").touch()  # perhaps these: then timm is asked
    assert subprocess.run(words, env=where, capture_output=True, text=True, check=True).stdout == "2 True\n"


def test_a_kept_command_names_no_folder_of_this_machine(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = [
        "spot",
        "study",
        "off-grid",
        "--model",
        f"vit-ti={tmp_path}/w.safetensors",
        "--data",
        str(tmp_path / "here"),
    ]
    monkeypatch.setattr("sys.argv", [*words, "--limit", "8"])
    assert report.command() == "spot study off-grid --model vit-ti=../w.safetensors --data . --limit 8"
    monkeypatch.setattr("sys.argv", ["spot", "study", f"--model=vit-ti={tmp_path}/w.safetensors"])
    assert report.command() == "spot study --model=vit-ti=../w.safetensors"
