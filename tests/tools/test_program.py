"""Every program says what it needs, and ends bad input in one sentence."""

import runpy
import sys

import pytest

PROGRAMS = {
    **dict.fromkeys(("paper.equal_training", "tools.make_retrofits"), "WEIGHTS TRAIN VAL"),
    "paper.fixed_weights": "WEIGHTS VAL OUT",
    "paper.merging_schedules": "WEIGHTS TRAIN OUT",
    "paper.policies": "MODEL WEIGHTS DATA",
    "paper.needle_control": "MIX DENSE",
    "paper.scale_up": "--rehearse",
    "paper.signs": "DATA WEIGHTS U2NETP",
    "tools.make_assets": "--runs",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_a_program_names_its_arguments(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and f"python -m {name}" in said and PROGRAMS[name] in said
