"""The study of a small thing in a large picture."""

import pytest
import torch

from paper import needle as study
from paper.backbone import backbones
from paper.canvas import box_of
from paper.lab import Lab
from paper.sources import StudySettings
from spot.data.difficulty import needle
from spot.data.scenes import Scenes
from spot.evaluation.cost import macs
from spot.models.checkpoints import save_folder
from spot.training.new_weights import random_vit


@pytest.fixture(scope="module")
def rotary(tmp_path_factory):
    """A folder with a rotary ViT of 64 pixels for the scenes' 32 classes."""
    options = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 32}
    folder = tmp_path_factory.mktemp("models") / "rotary"
    save_folder(random_vit("vit_small_patch16_rope_224", options), folder)
    return folder


def test_scenes_of_every_size_have_every_placement_against_the_dense_grid(rotary, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "SIZES", (64, 96))
    lab = Lab(backbones([str(rotary)]), StudySettings(limit=24, tokens=(16,)), cache=tmp_path)
    result = study.run(lab)
    names = ["dense grid", "smaller image", "isotropic", "spectral focus", "told the box"]
    assert [(row["pixels"], row["placement"]) for row in result.rows] == [(s, name) for s in (64, 96) for name in names]
    assert [row["used"] for row in result.rows if row["placement"] == "dense grid"] == [64, 144]
    model = lab.backbones[0].model
    dense, small, even, spectral, told = (row for row in result.rows if row["pixels"] == 96)
    assert dense["gmacs"] == macs(model, (3, 96, 96), 144) / 1e9 and "kept" not in dense
    assert small["gmacs"] == even["gmacs"] == told["gmacs"] == macs(model, tokens=16) / 1e9 < spectral["gmacs"]
    for row in (small, even, spectral, told):
        assert row["delta"] == pytest.approx(row["top1"] - dense["top1"])
    text = study.STUDY.markdown(result)
    assert "96 × 96" in text and "no row learned" in text
    study.STUDY.draw(result)


def test_photographs_stand_in_a_canvas_of_twice_the_models_size(make_lab):
    lab = make_lab(models=("one",), tokens=(16,))
    rows = study.run(lab).rows
    assert {row["pixels"] for row in rows} == {64} and rows[0]["used"] == 64
    assert rows[0]["images"] == 60


def test_a_box_is_what_is_seen_of_the_object():
    keys = [f"test/{index:08d}" for index in (3, 70)]
    masks = Scenes("test", difficulty=needle(128)).draw([3, 70]).masks
    for box, mask in zip(study.boxes(keys, "needle:128"), masks, strict=True):
        top, left, bottom, right = (128 * box).round().int().tolist()
        assert (mask[top:bottom, left:right] > 0).sum() == (mask > 0).sum() > 0
        assert all(edge.sum() > 0 for edge in (mask[top], mask[bottom - 1], mask[:, left], mask[:, right - 1]))
    assert study.boxes(["a/b.jpg"], "photos").tolist() == [pytest.approx(box_of("a/b.jpg"))]


def test_told_the_box_most_tokens_stand_in_it(rotary):
    model = backbones([str(rotary)])[0].model
    box = torch.tensor([[0.25, 0.5, 0.5, 0.75]], dtype=torch.float64)
    (positions,) = study.told(model, box, 64, 16)
    inside = ((positions >= box[0, :2]) & (positions < box[0, 2:])).all(1)
    # Three quarters of the rows, and almost all of each: 0.9 of the importance, less what goes to the dense grid.
    assert positions.shape == (16, 2) and 8 <= inside.sum() <= 12
