"""Model cards describe a model and its weights."""

from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import HfApi, ModelCard

from spot.hashes import hash_model
from tests.conftest import make_nano


def test_push_to_hub_sends_weights_settings_and_the_card(monkeypatch, tmp_path):
    def upload_folder(self, *, repo_id, folder_path, **options):
        for path in Path(folder_path).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **options: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    model = make_nano()
    model.vit.pretrained_cfg |= {"license": "cc-by-4.0", "hf_hub_id": "timm/nano"}
    model.push_to_hub("me/nano")
    assert {path.name for path in tmp_path.iterdir()} >= {"README.md", "config.json", "model.safetensors"}
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.license, card.data.base_model) == ("spot-vit", "cc-by-4.0", "timm/nano")
    assert hash_model(model) in card.text and "isotropic with 16 tokens" in card.text
