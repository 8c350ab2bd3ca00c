"""A run's folder belongs to one run at a time, and a kill never wedges it."""

import pytest
import torch

from spot.errors import InputError
from spot.training.run_folder import RunFolder

SETTINGS = {"recipe": {"name": "r", "lr": 0.1}, "seed": 0}


def test_two_runs_do_not_share_a_folder(tmp_path):
    first, second = RunFolder(tmp_path / "run", SETTINGS), RunFolder(tmp_path / "run", {**SETTINGS, "seed": 1})
    sentence = r"the run in .* is being written by process \d+ on "
    with first.held(), pytest.raises(InputError, match=sentence), second.held():
        pass
    with pytest.raises(InputError, match="made with seed=0, now seed=1; choose another --out"), second.held():
        pass  # it opened the folder when it was empty; it is asked again when it has the lock
    assert [path.name for path in first.path.iterdir()] == ["run.json"]


def test_what_a_kill_left_is_swept(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in (".spot.run.json", ".spot.run-0a1b2c3d.json", ".spot.lock"):
        (tmp_path / name).write_text("half")
    (tmp_path / "checkpoints" / ".spot.00000001.pt").write_text("half")
    with pytest.raises(InputError, match="holds something"):
        RunFolder(tmp_path, SETTINGS)  # a folder of checkpoints without run.json is not ours to use
    (tmp_path / "checkpoints").rename(tmp_path / ".spot.checkpoints")
    with RunFolder(tmp_path, SETTINGS).held():
        pass
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".spot.checkpoints", "run.json"]  # a folder is nobody's leftover


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, capsys):
    folder = RunFolder(tmp_path, SETTINGS)
    for step in (1, 2, 3):
        folder.save({"weight": torch.full((64,), float(step))}, step)
    newest = folder.checkpoints()[0]
    assert newest.name == "00000003.pt"
    content = bytearray(newest.read_bytes())
    content[content.find(torch.full((64,), 3.0).numpy().tobytes()) + 5] ^= 1
    newest.write_bytes(content)
    assert folder.load()["weight"][0] == 2
    assert "00000003.pt is not a checkpoint, or is damaged" in capsys.readouterr().err
