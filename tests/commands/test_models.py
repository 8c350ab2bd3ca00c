"""spot models: the names there are, with what they need and their accuracy."""

import json

from spot.cli import main
from tests.conftest import VIT_TINY


def test_every_built_in_model_has_a_row_with_its_accuracy(tmp_path, capsys):
    main(["models", "--json", str(tmp_path / "models.json")])
    said = " ".join(capsys.readouterr().out.split())
    assert "vit-ti" in said
    assert "scenes-mae" in said
    assert "--weights FILE" in said
    assert "weights=FILE" not in said
    rows = {row["name"]: row for row in json.loads((tmp_path / "models.json").read_text())["rows"]}
    assert rows[f"{VIT_TINY}+spot"]["alias"] == "vit-ti"
    assert rows["scenes-a"]["needs"] == "nothing"
    assert set(rows["scenes-a"]["accuracy"]) == {"9", "16", "36", "64"}
