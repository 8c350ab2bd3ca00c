"""The paper's scale in one program: what it would do, and that what is done is skipped. `make rehearse` runs it."""

from pathlib import Path

import pytest
import torch

import spot
from paper import scale_up
from paper.scale_up import FINETUNED, FULL, KINDS, MAE, STUDIES, Setup, Step, memory, random_weights, steps
from spot.errors import InputError
from spot.models.checkpoints import has_decoder


def test_the_guide_has_the_plans_hours_and_memory():
    guide = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text()
    listed = steps()
    for step in listed[:5]:
        assert f"| `{step.name}` | {step.description} | {step.hours:.1f} | {step.memory:.0f} |" in guide
    studies = sum(step.hours for step in listed if step.name in STUDIES)
    assert f"| the {len(STUDIES)} studies | tables and figures | {studies:.1f} |" in guide
    assert f"| all | | {sum(step.hours for step in listed):.0f} |" in guide


def test_memory_by_hand():
    """ViT-B: 85 M parameters in blocks × 16 bytes, and 256 images of 197 tokens × 768 channels × 12 blocks × 34."""
    assert memory(196, 2048) == pytest.approx(1.359 + 15.80, abs=0.01)


def test_what_is_done_is_skipped_and_steps_can_be_chosen(tmp_path, monkeypatch):
    done = []
    listed = [
        Step(name, name, lambda setup, name=name: done.append((name, setup.data)), f"{name}.txt", 0, 0, 0)
        for name in ("first", "second", "third")
    ]
    monkeypatch.setattr(scale_up, "steps", lambda: listed)
    (tmp_path / "first.txt").write_text("there")
    scale_up.scale_up(tmp_path, "imagenet", only=("first", "third"))
    assert done == [("third", "imagenet")]
    scale_up.scale_up(tmp_path, plan_only=True)
    assert len(done) == 1
    with pytest.raises(InputError, match="fourth"):
        scale_up.scale_up(tmp_path, only=("fourth",))


def test_the_rehearsals_files_are_read_as_the_published_ones_are(tmp_path):
    random_weights(tmp_path)
    setup = Setup("", tmp_path, tmp_path, cut={"depth": 2})
    assert has_decoder(torch.load(setup.file(FULL), weights_only=True)["model"])
    encoder = spot.load(MAE, weights=setup.file(FULL), depth=2)
    assert encoder.num_classes == 0
    tuned = spot.load(MAE, weights=setup.file(FINETUNED), depth=2)
    assert (tuned.vit.global_pool, tuned.num_classes) == ("avg", 1000)
    kind = KINDS["CLS-IN1k"]
    assert spot.load(kind.model, weights=setup.file(kind.model), depth=2).num_classes == 1000
