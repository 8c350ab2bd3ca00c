"""spot models: the names there are, with what they need and their accuracy."""

import subprocess
import sys

from tests.conftest import VIT_TINY


def test_every_built_in_model_has_a_row_with_its_accuracy(results, capsys):
    rows = {row["name"]: row for row in results("models")[0]}
    said = " ".join(capsys.readouterr().out.split())
    assert "vit-ti" in said
    assert "scenes-mae" in said
    assert "--weights FILE" in said
    assert "weights=FILE" not in said
    assert rows[f"{VIT_TINY}+spot"]["alias"] == "vit-ti"
    assert rows["scenes-a"]["needs"] == "nothing"
    assert set(rows["scenes-a"]["accuracy"]) == {"9", "16", "36", "64"}


def test_the_table_is_printed_without_importing_anything_heavy():
    heavy = "{'torch', 'timm', 'numpy', 'matplotlib'}"
    code = f"import sys, spot.cli as c; c.main(['models']); print({heavy} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "scenes-a" in result.stdout and result.stdout.strip().endswith("set()")
