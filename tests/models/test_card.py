"""Model cards say what was measured, and of these weights."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spot.cli import main
from spot.errors import InputError
from spot.hashes import hash_model
from spot.models.card import card, read_results
from spot.models.checkpoints import save_folder
from tests.conftest import make_nano

ROW = {"placement": "isotropic", "tokens": 9, "top1": 61.234, "low": 58.1, "high": 64.3, "images": 1000}


def results(path, **settings):
    path.write_text(json.dumps({"settings": settings, "rows": [ROW]}))
    return path


def test_a_card_has_the_table_with_its_interval_and_says_how_to_load(tmp_path):
    model = make_nano()
    measured = read_results(
        results(tmp_path / "r.json", weights=hash_model(model), arguments={"data": "scenes"}), model
    )
    text = card(model, "me/nano", measured)
    assert text.startswith("---\nlibrary_name: spot-vit\n")
    assert "| isotropic | 9 | 61.23 | 58.10 to 64.30 | 1000 |" in text
    assert 'spot.load("me/nano")' in text and "on scenes" in text
    assert hash_model(model) in text


def test_results_of_other_weights_are_refused(tmp_path):
    with pytest.raises(InputError, match="measured of other weights"):
        read_results(results(tmp_path / "r.json", weights="0123456789abcdef"), make_nano())
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(InputError, match="not a result of spot evaluate"):
        read_results(tmp_path / "r.json", make_nano())


def test_a_saved_model_brings_its_card_and_the_command_writes_it(tmp_path):
    model = make_nano()
    model.save_pretrained(tmp_path / "hub")
    assert "whose tokens can be placed anywhere" in (tmp_path / "hub" / "README.md").read_text()
    save_folder(model, tmp_path / "model")
    main(["card", str(tmp_path / "model"), "--out", str(tmp_path / "README.md"), "--licence", "cc-by-4.0"])
    assert "license: cc-by-4.0" in (tmp_path / "README.md").read_text()


def test_push_to_hub_sends_weights_settings_and_the_card(monkeypatch):
    from huggingface_hub import HfApi

    sent = {}

    def upload_folder(self, *, repo_id, folder_path, **options):
        sent[repo_id] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **options: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    model = make_nano()
    model.push_to_hub("me/nano")
    assert sent.keys() == {"me/nano"} and sent["me/nano"].keys() >= {"README.md", "config.json", "model.safetensors"}
    text = sent["me/nano"]["README.md"].decode()
    assert hash_model(model) in text and "More Information Needed" not in text
