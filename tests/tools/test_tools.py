"""The programs of tools/, in small."""

import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import spot
from spot.cli import main
from spot.models.deltas import is_delta
from spot.placement.policy import Policy
from tools import equal_training, fill_results, make_assets, make_retrofits, policies

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


NAME = "vit_tiny_patch16_224"
FEW = ("batch_size=2", "epochs=0.5", "warmup_epochs=0", "budgets=((4,),)", "shares=(1,)", "weights=(1,)")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A ViT's weights and 24 photographs of noise."""
    folder = tmp_path_factory.mktemp("real")
    images = folder / "images" / "n01440764"
    images.mkdir(parents=True)
    for number in range(24):
        pixels = np.random.default_rng(number).integers(0, 255, (224, 224, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number}.png")
    save_file(timm.create_model(NAME).state_dict(), folder / f"{NAME}.safetensors")
    (folder / "aside.txt").write_text("n01440764/3.png\nn01440764/5.png\n")
    return folder


def test_a_retrofit_is_trained_shipped_as_a_delta_and_measured(real, tmp_path, monkeypatch):
    monkeypatch.setattr(make_retrofits, "SHARES", (0.0, 0.5))
    monkeypatch.setattr(make_retrofits, "call", lambda *words: main([str(word) for word in words]))
    folders = (real, real / "images", real / "images", tmp_path / "runs")
    few = [each for each in FEW if not each.startswith("budgets")]
    how = {
        "retrofits": {NAME: FEW},
        "again": {NAME: (*few, "budgets=((20,),)")},
        "budgets": (4, 196),
        "set_aside": real / "aside.txt",
    }
    make_retrofits.main(*folders, assets=tmp_path, **how)
    delta = tmp_path / f"{NAME}+spot.safetensors"
    assert is_delta(delta)
    shares = json.loads((tmp_path / "runs" / NAME / "shares.json").read_text())
    assert [row["share of the change"] for row in shares] == [0.0, 0.5]
    assert spot.load(delta, weights=real / f"{NAME}.safetensors").fewest == 16
    run = json.loads((tmp_path / "runs" / NAME / "run.json").read_text())
    assert run["settings"]["images"]["count"] == 22
    card = (tmp_path / "RETROFITS.md").read_text()
    assert spot.load(delta, weights=real / f"{NAME}.safetensors", prior="learned").cascade is not None
    recipe = json.loads((tmp_path / "runs" / f"{NAME}-again" / "run.json").read_text())["settings"]
    assert recipe["recipe"]["fewest"] == 16 and recipe["teacher"]["name"].startswith(NAME)
    seeds = [tmp_path / "runs" / folder for folder in (NAME, f"{NAME}-seed-1")]
    assert [json.loads((run / "run.json").read_text())["settings"]["recipe"]["seed"] for run in seeds] == [0, 1]
    one, two, mean = (
        spot.load(run / "model").vit.blocks[0].mlp.fc1.weight for run in (*seeds, tmp_path / "runs" / f"{NAME}-mean")
    )
    assert not torch.equal(one, two)
    torch.testing.assert_close(mean, (one + two) / 2)
    for title in (NAME, f"{NAME}+spot", f"{NAME}+spot, seed 0", f"{NAME}+spot, their mean"):
        assert re.search(
            rf"^\| {re.escape(title)} \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| 24 \|$", card, re.MULTILINE
        )


def test_ways_to_teach_are_trained_alike_and_compared_image_by_image(real, tmp_path, monkeypatch):
    monkeypatch.setattr(equal_training, "SET_ASIDE", real / "aside.txt")
    ways = {"windows, sizes": ((), "auto"), "a smaller image": (("sizes=none", "view=resize"), "resize")}
    how = {"out": tmp_path, "name": NAME, "ways": ways, "budgets": (4,), "options": (*FEW, "views=1")}
    equal_training.main(real, real / "images", real / "images", tmp_path / "runs", **how)
    rows = json.loads((tmp_path / "equal-training.json").read_text())["rows"]
    assert [row["what the student is shown"] for row in rows] == list(ways)
    assert re.fullmatch(r"[+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\)", rows[1]["against the first, 4"])
    assert "a smaller image" in (tmp_path / "equal-training.md").read_text()
    assert len(list((tmp_path / "runs" / "cache").iterdir())) == 1  # the teacher was asked once for both
    settings = [json.loads(file.read_text())["settings"] for file in (tmp_path / "runs").glob("*/run.json")]
    for each in settings:
        each["recipe"].pop("sizes"), each["recipe"].pop("view")
    assert len(settings) == 2 and settings[0] == settings[1]


def test_policies_stand_beside_their_controls(real, tmp_path):
    model = spot.load(NAME, weights=real / f"{NAME}.safetensors").eval()
    Policy(model).save(tmp_path / "flat.safetensors")  # its map is the same everywhere, so it is isotropic
    with torch.no_grad():
        rows = policies.main(model, str(real / "images"), [tmp_path / "flat.safetensors"], set_aside=real / "aside.txt")
        images = torch.stack(
            [model.transform()(Image.open(real / "images" / "n01440764" / f"{n}.png")) for n in (3, 5)]
        )
        full, few = (model(images, tokens=tokens).log_softmax(1) for tokens in (196, 25))
    named = {row["placement"]: row for row in rows}
    assert list(named) == ["isotropic", "flat", "flat, map of another image", "flat, mean of its maps",
                           "class attention of the dense ViT"]  # fmt: skip
    assert named["isotropic"]["KL"] == pytest.approx((full.exp() * (full - few)).sum(1).mean().item(), rel=1e-3)
    assert named["flat"]["KL"] == pytest.approx(named["isotropic"]["KL"], rel=1e-3)
    assert named["class attention of the dense ViT"]["KL"] != pytest.approx(named["isotropic"]["KL"], rel=1e-3)


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


def test_accuracies_stand_beside_what_they_cost_with_their_map():
    about = {"backbone": "vit_tiny", "images": 9}
    rows = [{**about, "placement": "isotropic", "tokens": 25, "top1": 40.0, "GMACs": 0.15},
            {**about, "placement": "isotropic", "tokens": 49, "top1": 50.0, "GMACs": 0.3},
            {**about, "placement": "focus", "tokens": 25, "top1": 45.0, "GMACs": 16.5},
            {**about, "placement": "oracle", "tokens": 25, "top1": 99.0, "images": 2}]  # fmt: skip
    table = fill_results.accuracy(json.dumps({"rows": rows})).splitlines()
    assert table[0] == "| model | placement | 25 tokens | 49 tokens | GMACs at 25 |"
    assert table[2:] == ["| vit-ti | `isotropic` | 40.0 | 50.0 | 0.15 |", "| vit-ti | `focus` | 45.0 | – | 16.50 |"]
    with pytest.raises(AssertionError, match="same images"):
        fill_results.accuracy(json.dumps({"rows": [*rows[:2], {**rows[2], "images": 300}]}))


def test_the_same_picture_at_another_size_and_quality_is_a_near_duplicate_and_others_are_not(tmp_path):
    from tools.near_duplicates import NEAR, distances, hashes

    draw = np.random.default_rng(0)
    for number in range(8):
        pixels = draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels).resize((256, 256), Image.Resampling.BICUBIC)
        for folder, made in (
            ("a", picture),
            ("b", picture.resize((180, 180)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        ):
            (tmp_path / folder).mkdir(exist_ok=True)
            made.save(tmp_path / folder / f"{number}.jpg", quality=70)
    _, plain, mirrored = hashes(tmp_path / "a")
    _, others, _ = hashes(tmp_path / "b")
    apart = distances(mirrored, others)
    assert (apart.diagonal() <= NEAR).all() and (apart[~np.eye(8, dtype=bool)] > NEAR).all()
    assert (distances(plain, others).diagonal() > NEAR).all()
    assert distances(plain[:1], -plain[:1]).item() == 256
