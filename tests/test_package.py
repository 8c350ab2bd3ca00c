"""What surrounds the code: versions agree, and CONTRIBUTING's examples run."""

import re
import tomllib
from pathlib import Path

import torch

import spot
from paper.study import Result

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == spot.__version__
    assert f"version: {spot.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[0] == spot.__version__


def test_contributing_s_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 4  # a prior, a baseline, a study, an objective
    names = {}
    for block in blocks:
        exec(block, names)
    positions = names["ring"](names["images"], 4)
    torch.testing.assert_close(positions[0, :2], torch.tensor([[0.5, 0.8], [0.8, 0.5]]))
    assert names["logits"].shape == (2, 32)
    assert names["central"].build(spot.load("scenes-a"), 4).place(names["images"])[0].sub(0.5).abs().max() < 0.07
    assert names["loss"].isfinite()
    result = Result([{"backbone": "a", "cells": 64}])
    assert names["STUDY"].lines(result) == [{"backbone": "a", "cells": 64}]
    assert names["STUDY"].draw(result).axes


def test_workflows_run_what_developers_run():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "- run: .ci/run" in text
    assert all(f'"3.{minor}"' in text for minor in (11, 12, 13))
