"""Files are written whole or not at all."""

import pytest

from spot.atomic import whole


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")

    def write_half():
        with whole(path) as temporary:
            temporary.write_text("half a n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_a_good_write_replaces_it_and_makes_folders(tmp_path):
    path = tmp_path / "deep" / "result.png"
    with whole(path) as temporary:
        assert temporary.suffix == ".png"
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o444 == 0o444
