"""spot demo: on scenes, and where it cannot."""

import pytest
from PIL import Image

from spot.cli import main
from tests.conftest import make_nano


@pytest.fixture
def reader(tmp_path):
    """A random ViT for scenes, as a folder."""
    make_nano(img_size=64, num_classes=32).save_pretrained(tmp_path / "reader")
    return str(tmp_path / "reader")


def test_it_prints_the_table_and_draws_both_pictures(reader, tmp_path, capsys):
    words = ["--scenes", "32", "--tokens", "4", "9", "4", "--out", str(tmp_path / "d")]
    main(["demo", "--model", reader, *words])
    text = capsys.readouterr().out
    for name in ("patch dropout", "uniform", "gaussian", "sobol", "isotropic", "center", "salient", "oracle"):
        assert name in text
    assert "4 tokens" in text and "9 tokens" in text and "Next:" in text
    for name in ("placements.png", "accuracy.png"):
        assert min(Image.open(tmp_path / "d" / name).size) > 200


def test_bad_input_is_one_sentence(reader, tmp_path, refused):
    assert "32 scenes" in refused("demo", "--model", reader, "--scenes", "8")
    assert "one or more numbers" in refused("demo", "--model", reader, "--tokens")
    (tmp_path / "file").write_text("")
    said = refused("demo", "--out", str(tmp_path / "file" / "d"))
    assert "cannot write" in said and "choose another" in said
    make_nano().save_pretrained(tmp_path / "ten")
    assert "10 classes" in refused("demo", "--model", str(tmp_path / "ten"), "--out", str(tmp_path))
