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
from paper import equal_training, policies, program
from paper.equal_training import SmallerMerged
from spot.cli import main
from spot.models.family import is_delta
from spot.placement.policy import Policy
from tools import fill_results, make_assets, make_retrofits

NANO = "vit_tiny_patch16_224 --fresh img_size=64 patch_size=16 embed_dim=32 depth=1 num_heads=2 num_classes=32"
SHORT = "--limit 16 --val-limit 8 --set batch_size=8 epochs=1"
STEPS = (
    make_assets.Step("small", "from nothing", f"pretrain {NANO} --recipe scenes {SHORT}"),
    make_assets.Step("taught", "retrofitted", f"retrofit {{runs}}/small/model --recipe scenes-retrofit {SHORT}"),
)


def in_this_process(*words, program=None):
    """Instead of a new process for each verb, which imports everything anew. A policy learns for one epoch."""
    main([*map(str, words), *(("--epochs", "1", "--views", "1") if words[0] == "learn" else ())])


def test_assets_are_trained_shipped_measured_and_described_and_what_is_done_is_kept(tmp_path, monkeypatch):
    runs, assets = tmp_path / "runs", tmp_path / "assets"
    assets.mkdir()
    words = make_assets.SCENES
    card = make_assets.Card("README.md", words, STEPS, "scenes", 32, ("isotropic", "uniform"), (9, 16))
    for name, value in (("ASSETS", assets), ("CARDS", [card]), ("call", in_this_process)):
        monkeypatch.setattr(make_assets, name, value)
    make_assets.main(runs)
    model = spot.load(assets / "taught.safetensors")
    assert model.num_classes == 32
    text = (assets / "README.md").read_text()
    measured = json.loads((runs / "accuracy-32.json").read_text())
    assert len(measured) == 2
    for name, rows in zip(("small", "taught"), measured.values(), strict=True):
        for prior in card.priors:
            cells = [f"{row['top1']:.1f}" for row in rows if row["placement"] == prior]
            assert len(cells) == 2
            assert f"| {name} | {prior} | {' | '.join(cells)} |" in text
    assert "python -m tools.recipes retrofit runs/assets/small/model" in text
    assert str(tmp_path) not in text

    bytes_before = (assets / "taught.safetensors").read_bytes()
    monkeypatch.setattr(make_assets, "call", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(make_assets, "evaluate", lambda *_, **__: pytest.fail("measured again"))
    make_assets.main(runs)
    assert (assets / "taught.safetensors").read_bytes() == bytes_before


NAME = "test_vit"  # timm's own for tests: 160 × 160 pixels, a grid of 100, width 64, depth 6
FEW = (
    "img_size=160",
    "batch_size=2",
    "epochs=0.5",
    "warmup_epochs=0",
    "budgets=((4,),)",
    "shares=(1,)",
    "weights=(1,)",
)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A ViT's weights, 24 photographs of noise in images, and half of them in train."""
    folder = tmp_path_factory.mktemp("real")
    for images, count in ((folder / "images" / "n01440764", 24), (folder / "train" / "n01440764", 12)):
        images.mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 255, (160, 160, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / f"{number}.png")
    save_file(timm.create_model(NAME).state_dict(), folder / f"{NAME}.safetensors")
    (folder / "aside.txt").write_text("n01440764/3.png\nn01440764/5.png\n")
    return folder


def test_a_retrofit_is_trained_shipped_as_a_delta_and_measured(real, tmp_path, monkeypatch):
    few = [each for each in FEW if not each.startswith("budgets")]
    changes = {
        **{"SHARES": (0.0, 0.5), "EARLY": (16, 25), "call": in_this_process, "ASSETS": tmp_path, "BUDGETS": (4, 100)},
        **{"RETROFITS": {NAME: FEW}, "AGAIN": {NAME: (*few, "budgets=((20,),)")}, "SET_ASIDE": real / "aside.txt"},
    }
    for name, value in changes.items():
        monkeypatch.setattr(make_retrofits, name, value)
    monkeypatch.setattr(program, "SET_ASIDE", real / "aside.txt")
    make_retrofits.main(real, real / "train", real / "images", tmp_path / "runs")
    delta = tmp_path / f"{NAME}+spot.safetensors"
    assert is_delta(delta)
    shares = json.loads((tmp_path / "runs" / NAME / "shares.json").read_text())
    assert [row["share of the change"] for row in shares] == [0.0, 0.5]
    family = spot.Family(delta, weights=real / f"{NAME}.safetensors")
    assert family.min_tokens == 16 and family.model(tokens=16).policy is not None
    assert json.loads((tmp_path / "models.json").read_text())[f"{NAME}+spot"]["accuracy"].keys() == {"4", "100"}
    run = json.loads((tmp_path / "runs" / NAME / "run.json").read_text())
    assert run["settings"]["images"]["count"] == 10
    card = (tmp_path / "RETROFITS.md").read_text()
    assert spot.Cascade.load(delta.with_suffix(".cascade.json"), family).budgets[-1] == 100
    recipe = json.loads((tmp_path / "runs" / f"{NAME}-again" / "run.json").read_text())["settings"]
    assert recipe["recipe"]["min_tokens"] == 16 and recipe["teacher"]["name"].startswith(NAME)
    seeds = [tmp_path / "runs" / folder for folder in (NAME, f"{NAME}-seed-1")]
    assert [json.loads((run / "run.json").read_text())["settings"]["recipe"]["seed"] for run in seeds] == [0, 1]
    one, two, mean = (
        spot.load(run / "model").vit.blocks[0].mlp.fc1.weight for run in (*seeds, tmp_path / "runs" / f"{NAME}-mean")
    )
    assert not torch.equal(one, two)
    torch.testing.assert_close(mean, (one + two) / 2)
    for title in (NAME, f"{NAME}+spot", f"{NAME}+spot, seed 0", f"{NAME}+spot, mean of both seeds"):
        assert re.search(
            rf"^\| {re.escape(title)} \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| 24 \|$", card, re.MULTILINE
        )


def test_ways_to_teach_are_trained_alike_and_compared_image_by_image(real, tmp_path, monkeypatch):
    ways = {name: equal_training.VARIANTS[name] for name in (equal_training.FIRST, equal_training.SMALLER)}
    ways[equal_training.SMALLER] = equal_training.Variant(("scale_std=none",), equal_training.Resized, "resize")
    changes = {"SET_ASIDE": real / "aside.txt", "OUT": tmp_path, "NAME": NAME, "VARIANTS": ways, "STEPS": FEW}
    for name, value in {**changes, "BUDGETS": (25,)}.items():
        monkeypatch.setattr(equal_training, name, value)
    folders = (real, real / "images", real / "images", tmp_path / "runs")
    equal_training.main(*folders)
    rows = json.loads((tmp_path / "equal-training.json").read_text())["rows"]
    assert [row["what the student is shown"] for row in rows] == list(ways)
    assert re.fullmatch(r"[+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\)", rows[1]["against the first, 25"])
    assert "a smaller image" in (tmp_path / "equal-training.md").read_text()
    settings = [json.loads(file.read_text())["settings"] for file in (tmp_path / "runs").glob("*/run.json")]
    for each in settings:
        each["recipe"].pop("scale_std")
    assert len(settings) == 2 and settings[0] == settings[1]
    # The same two models, with and without merging:
    monkeypatch.setattr(equal_training, "start", lambda *_, **__: pytest.fail("trained again"))
    equal_training.main(*folders, merged=True)
    merged = json.loads((tmp_path / "equal-merging.json").read_text())["rows"]
    assert [row["what is shown"] for row in merged] == [*ways, *(f"{way}, merged" for way in ways)]
    assert [row["top-1"] for row in merged[:2]] == [f"{row['25 tokens']:.1f}" for row in rows]
    assert [row["tokens at first"] for row in merged[:2]] == [25, 25] and merged[2]["tokens at first"] > 25
    blocks = SmallerMerged(spot.load(tmp_path / "runs" / "a-smaller-image" / "model"), 25).schedule()
    assert merged[3]["merged in blocks"] == ", ".join(f"{block}: {n}" for block, n in enumerate(blocks) if n)
    monkeypatch.setattr(equal_training, "evaluate", lambda *_: pytest.fail("measured again"))
    equal_training.main(*folders, merged=True)


def test_policies_stand_beside_their_controls(real, monkeypatch):
    monkeypatch.setattr(program, "SET_ASIDE", real / "aside.txt")
    model = spot.load(NAME, weights=real / f"{NAME}.safetensors").eval()
    model.policy = Policy(model.patch_size)  # a flat map: it is isotropic
    rows = policies.compared(model, real / "images")
    files = [real / "images" / "n01440764" / f"{number}.png" for number in (3, 5)]
    with torch.no_grad():
        images = torch.stack([model.transform()(Image.open(file)) for file in files])
        full, few = (model(images, tokens=tokens, prior="isotropic").log_softmax(1) for tokens in (100, 25))
    apart = {row["placement"]: row["KL"] for row in rows}
    even = pytest.approx((full.exp() * (full - few)).sum(1).mean().item(), rel=1e-3)
    assert apart["isotropic"] == apart["the policy"] == apart["the policy, mean of its maps"] == even
    assert apart["class attention of the dense ViT"] != even


def test_a_verb_that_fails_stops_the_program(capfd):
    with pytest.raises(SystemExit, match="spot retofit stopped with code 2"):  # answered before torch is imported
        make_assets.call("retofit", "no-such-model", "--data", "scenes", "--out", "unused")


def test_a_block_of_the_results_page_is_filled_from_its_file(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.md").write_text("# Title\n\n| x |\n| --- |\n| 1 |\n\nText.\n\n| other |\n")
    page = "before\n<!-- results/a.md -->\nold\n<!-- end -->\nafter\n"
    filled = fill_results.filled(page, tmp_path)
    assert filled == "before\n<!-- results/a.md -->\n\n| x |\n| --- |\n| 1 |\n\n<!-- end -->\nafter\n"
    assert fill_results.filled(filled, tmp_path) == filled


def test_a_block_can_show_some_rows_of_its_file(tmp_path):
    page = "# T\n\n| prior | x |\n| --- | --- |\n| a | 1 |\n| b | 2 |\n| a, searched | 3 |\n"
    assert fill_results.table(page, "a; a, searched", without=True) == "| prior | x |\n| --- | --- |\n| b | 2 |"
    assert fill_results.table(page, "a, 2") == "| prior | x |\n| --- | --- |\n| a | 1 |\n| b | 2 |"
    with pytest.raises(AssertionError, match="no row has the cell"):
        fill_results.table(page, "c")


def test_accuracies_stand_beside_what_they_cost_with_their_map():
    about = {"backbone": "vit_tiny", "images": 9}
    rows = [{**about, "placement": "isotropic", "tokens": 25, "top1": 40.0, "GMACs": 0.15},
            {**about, "placement": "isotropic", "tokens": 49, "top1": 50.0, "GMACs": 0.3},
            {**about, "placement": "learned", "tokens": 25, "top1": 45.0, "GMACs": 16.5},
            {**about, "placement": "oracle", "tokens": 25, "top1": 99.0, "images": 2}]  # fmt: skip
    table = fill_results.accuracy(json.dumps({"rows": rows})).splitlines()
    assert table[0] == "| model | placement | 25 tokens | 49 tokens | GMACs at 25 |"
    assert table[2:] == ["| vit-ti | `isotropic` | 40.0 | 50.0 | 0.15 |", "| vit-ti | `learned` | 45.0 | – | 16.50 |"]
    with pytest.raises(AssertionError, match="same images"):
        fill_results.accuracy(json.dumps({"rows": [*rows[:2], {**rows[2], "images": 300}]}))
