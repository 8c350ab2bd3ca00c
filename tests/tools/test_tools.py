"""The programs of tools/, in small."""

import json
import re

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

import spot
from spot.evaluation.accuracy import Setting
from spot.models.deltas import is_delta
from tools import fill_results, make_assets, make_retrofits

NANO = "vit_tiny_patch16_224 --fresh img_size=64 patch_size=16 embed_dim=32 depth=1 num_heads=2 num_classes=32"
SHORT = "--limit 16 --val-limit 8 --set batch_size=8 epochs=1"
STEPS = (
    make_assets.Step("small", "from nothing", f"pretrain {NANO} --recipe scenes {SHORT}"),
    make_assets.Step("taught", "retrofitted", f"retrofit {{runs}}/small/model --recipe scenes-retrofit {SHORT}"),
)


def test_assets_are_trained_shipped_measured_and_described_and_what_is_done_is_kept(tmp_path, monkeypatch):
    runs, assets = tmp_path / "runs", tmp_path / "assets"
    assets.mkdir()
    monkeypatch.setattr(make_assets, "BUDGETS", (9, 16))
    make_assets.main(runs, assets, STEPS, images=32)
    model = spot.load(assets / "taught.safetensors")
    assert model.num_classes == 32
    card = (assets / "README.md").read_text()
    measured = json.loads((runs / "accuracy-32.json").read_text())
    assert len(measured) == 2
    for name, rows in zip(("small", "taught"), measured.values(), strict=True):
        for prior in make_assets.PRIORS:
            cells = [f"{row['top1']:.1f}" for row in rows if row["placement"] == prior]
            assert len(cells) == 2
            assert f"| {name} | {prior} | {' | '.join(cells)} |" in card
    assert "spot retrofit runs/assets/small/model" in card
    assert str(tmp_path) not in card

    bytes_before = (assets / "taught.safetensors").read_bytes()
    monkeypatch.setattr(make_assets, "call", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(make_assets, "evaluate", lambda *_, **__: pytest.fail("measured again"))
    make_assets.main(runs, assets, STEPS, images=32)
    assert (assets / "taught.safetensors").read_bytes() == bytes_before


def test_a_retrofit_is_trained_shipped_as_a_delta_and_measured(tmp_path):
    name, images, assets = "vit_tiny_patch16_224", tmp_path / "images" / "n01440764", tmp_path / "assets"
    images.mkdir(parents=True)
    assets.mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 255, (224, 224, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number}.png")
    save_file(timm.create_model(name).state_dict(), tmp_path / f"{name}.safetensors")
    small = ("--set", "batch_size=2", "epochs=0.5", "warmup_epochs=0", "budgets=((4,),)", "shares=(1,)", "weights=(1,)")
    make_retrofits.main(
        tmp_path,
        images.parent,
        images.parent,
        tmp_path / "runs",
        assets=assets,
        names=[name],
        settings=[Setting("isotropic", 9)],
        options=small,
    )
    delta = assets / f"{name}+spot.safetensors"
    assert is_delta(delta)
    card = (assets / "RETROFITS.md").read_text()
    for title in (name, f"{name}, retrofitted", f"{name}+spot"):
        assert re.search(rf"^\| {re.escape(title)} \| [\d.]+ \| [\d.]+ \| 4 \|$", card, re.MULTILINE)


def test_a_verb_that_fails_stops_the_program(capfd):
    with pytest.raises(SystemExit, match="spot retrofit stopped with code 2"):
        make_assets.call("retrofit", "no-such-model", "--data", "scenes", "--out", "unused")


def test_a_block_of_the_results_page_is_filled_from_its_file(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.md").write_text("# Title\n\n| x |\n| --- |\n| 1 |\n\nText.\n\n| other |\n")
    page = "before\n<!-- results/a.md -->\nold\n<!-- end -->\nafter\n"
    filled = fill_results.filled(page, tmp_path)
    assert filled == "before\n<!-- results/a.md -->\n\n| x |\n| --- |\n| 1 |\n\n<!-- end -->\nafter\n"
    assert fill_results.filled(filled, tmp_path) == filled
