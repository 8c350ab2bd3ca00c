"""spot demo: on scenes, and where it cannot."""

import tempfile

import pytest
from PIL import Image

from spot.cli import main
from spot.demo import side_by_side
from tests.conftest import make_nano


@pytest.fixture
def reader(tmp_path):
    """A random ViT for scenes, as a folder."""
    make_nano(img_size=64, num_classes=32).save_pretrained(tmp_path / "reader")
    return str(tmp_path / "reader")


def test_it_prints_the_table_and_draws_both_pictures(reader, tmp_path, capsys):
    words = ["--scenes", "32", "--tokens", "4", "9", "--gallery", "3", "--out", str(tmp_path / "d")]
    main(["demo", "--model", reader, *words])
    text = capsys.readouterr().out
    for name in ("patch dropout", "uniform", "gaussian", "sobol", "isotropic", "center", "salient", "oracle"):
        assert name in text
    assert "4 tokens" in text and "9 tokens" in text and "Next:" in text
    for name in ("placements.png", "accuracy.png"):
        assert min(Image.open(tmp_path / "d" / name).size) > 200


def test_a_line_per_placement_and_a_column_per_budget():
    rows = [{"placement": p, "tokens": n, "top1": s} for p, n, s in (("a", 9, 1.0), ("a", 4, 2.0), ("b", 4, 3.0))]
    assert side_by_side(rows, (4, 9)) == [
        {"placement": "a", "4 tokens": 2.0, "9 tokens": 1.0},
        {"placement": "b", "4 tokens": 3.0, "9 tokens": None},
    ]


def test_bad_input_is_one_sentence(reader, tmp_path, refused):
    assert "32 scenes" in refused("demo", "--model", reader, "--scenes", "8")
    assert "different numbers" in refused("demo", "--model", reader, "--tokens", "4", "4")
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused("demo", "--out", str(tmp_path / "file" / "d"))
    make_nano().save_pretrained(tmp_path / "ten")
    assert "10 classes" in refused("demo", "--model", str(tmp_path / "ten"), "--out", str(tmp_path))


def test_a_folder_without_permission_is_refused_before_the_work(tmp_path, refused, monkeypatch):
    def denied(*arguments, **options):  # root may write anywhere, so the system's answer is put in its mouth
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    sentence = refused("demo", "--out", str(tmp_path / "d"))
    assert "cannot write" in sentence and "Permission denied" in sentence and "choose another" in sentence
