"""Model cards say what a model is, and of which weights."""

from pathlib import Path
from types import SimpleNamespace

from spot.hashes import hash_model
from spot.models.card import card
from tests.conftest import make_nano


def test_a_card_says_what_the_model_is_and_how_to_load_it():
    model = make_nano()
    text = card(model, "me/nano")
    assert text.startswith("---\nlibrary_name: spot-vit\n")
    assert 'spot.load("me/nano")' in text and hash_model(model) in text


def test_a_saved_model_brings_its_card(tmp_path):
    model = make_nano()
    model.save_pretrained(tmp_path / "hub")
    assert "whose tokens can be placed anywhere" in (tmp_path / "hub" / "README.md").read_text()
    assert "license: cc-by-4.0" in card(model, "me/nano", licence="cc-by-4.0")


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
