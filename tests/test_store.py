"""Files are written whole or not at all, read in one place, and known by their content."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spot.errors import InputError
from spot.hashes import hash_file, hash_json, hash_model, hash_tensors
from spot.store import (
    atomic_write,
    decode_names,
    encode_names,
    has_kind,
    is_leftover,
    locked,
    read_json,
    read_state,
    read_tensors,
    refuse_difference,
    sweep,
    write_json,
    write_state,
    write_tensors,
)
from tests.faults.harness import FORK, Process, apart


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Writing


def test_a_good_write_replaces_it_and_makes_folders(tmp_path):
    path = tmp_path / "deep" / "result.png"
    with atomic_write(path) as temporary:
        assert temporary.suffix == ".png"
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o444 == 0o444
    path.chmod(0o640)
    with atomic_write(path) as temporary:
        temporary.write_text("newer")
    assert path.stat().st_mode & 0o777 == 0o640  # as its owner wanted it
    assert names(path.parent) == ["result.png"]


def test_a_symbolic_link_is_followed_not_replaced(tmp_path):
    target, link = tmp_path / "there" / "result.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to("there/result.json")
    write_json(link, [1])  # to nothing yet
    write_json(link, [2])
    assert link.is_symlink()
    assert json.loads(target.read_text()) == [2]
    assert names(target.parent) == ["result.json"]


def test_pipes_and_devices_are_written_to_and_stay_what_they_are(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    write_json(pipe, {"top1": 1})
    assert json.loads(reader.communicate(timeout=300)[0]) == {"top1": 1}
    write_json("/dev/null", [1])
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_standard_output_is_written_to_in_order(tmp_path, output):
    """Redirected to a file, /dev/stdout leads to that file, which must not be replaced under the shell."""
    log = tmp_path / "log.txt"
    code = f"print('before'); write_json({output!r}, [1]); print('after')"
    with log.open("w") as file:
        subprocess.run([sys.executable, "-c", f"from spot.store import *\n{code}"], stdout=file, check=True)
    assert log.read_text() == "before\n[\n  1\n]\nafter\n"
    assert names(tmp_path) == ["log.txt"]
    assert not Path("-").exists()
    assert not Path("/dev/stdout").is_dir()


def test_what_a_killed_writer_left_is_used_again(tmp_path):
    ready = FORK.Event()

    def write_forever():
        with atomic_write(tmp_path / "run.json"):
            ready.set()
            time.sleep(60)

    writer = FORK.Process(target=write_forever)
    writer.start()
    assert ready.wait(60)
    (left,) = tmp_path.iterdir()
    assert is_leftover(left)
    sweep(tmp_path)
    assert names(tmp_path) == [left.name]  # its writer lives
    write_json(tmp_path / "run.json", [1])  # and does not stop another
    assert names(tmp_path) == [left.name, "run.json"]
    writer.kill()
    writer.join()
    write_json(tmp_path / "run.json", [2])
    assert names(tmp_path) == ["run.json"]
    left.write_text("half")
    sweep(tmp_path)
    assert names(tmp_path) == ["run.json"]


@pytest.mark.parametrize("name", ["run.json", ".hidden", "a.tmp.json", ".git", "spot.x.json", ".lock"])
def test_files_of_others_are_not_leftovers(tmp_path, name):
    (tmp_path / name).write_text("mine")
    sweep(tmp_path)
    assert names(tmp_path) == [name]


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path):
    path = tmp_path / ("ä" * 120 + ".json")
    write_json(path, [1])
    with locked(path):
        assert read_json(path) == [1]


@pytest.mark.parametrize(
    "write", [lambda path: write_json(path, "x" * 200_000), lambda path: write_state(path, {"a": torch.ones(50_000)})]
)
def test_a_full_disk_is_one_sentence_and_the_old_file_stays(tmp_path, write):
    """A limit on the size of files stands in for a disk that fills up while the file is written."""
    path = tmp_path / "result"
    path.write_text("old")

    def fill_up():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        write(path)

    error = apart(fill_up)
    assert isinstance(error, InputError) and str(error).startswith(f"cannot write {path}: ")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["result"]


def test_a_folder_that_cannot_be_written_to_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file/x\.json: "):
        write_json(tmp_path / "file" / "x.json", [])


# Locks


def test_many_processes_never_hold_a_lock_together(tmp_path):
    """Each adds one to a number without care, as often as it gets the lock."""
    count = tmp_path / "count"
    count.write_text("0")

    def add():
        got, end = 0, time.time() + 0.5
        while time.time() < end:
            with suppress(InputError), locked(count):
                count.write_text(str(int(count.read_text()) + 1))
                got += 1
        return got

    got = [process.end() for process in [Process(add) for _ in range(3)]]
    assert int(count.read_text()) == sum(got) > 0


# Reading


READERS = {
    "x.json": lambda path: read_json(path, "a result"),
    "x.safetensors": lambda path: read_tensors(path, "spot-test", "a result"),
    "x.pt": lambda path: read_state(path, "a result"),
}
DAMAGED = [
    ("x.json", (b"", b"{", b"\xff\xfe", b"[" * 100_000)),
    ("x.safetensors", (b"", b"text", b"PK\x03\x04" * 100, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}")),
    ("x.pt", (b"", b"\x80\x02", b"PK\x03\x04", b"x" * 50)),
]


@pytest.mark.parametrize("name, content", [(name, content) for name, every in DAMAGED for content in every])
def test_a_file_of_something_else_is_one_sentence(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} .*(not a result|refused)") as raised:
        READERS[name](tmp_path / name)
    assert "\n" not in str(raised.value)
    assert not has_kind(tmp_path / name, "spot-test")


@pytest.mark.parametrize("read", READERS.values())
def test_a_missing_file_and_a_folder_are_one_sentence(tmp_path, read):
    with pytest.raises(InputError, match=r"a result was expected, but .* is missing"):
        read(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"a result was expected, but .* is a folder"):
        read(tmp_path)


# Tensors

TIED = torch.rand(3, 5)
TENSORS = {
    "b.weight": TIED,
    "tied": TIED[1:],
    "a": torch.arange(7),
    "half": torch.rand(3).half(),
    "brain": torch.rand(2, 2).bfloat16(),
    "small": torch.tensor([-3, 4], dtype=torch.int8),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "turned": torch.rand(4, 3).T,
}
ABOUT = {"tokens": 25, "prior": "sobol", "names": ["ä", "b"]}


def test_safetensors_reads_what_was_written(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, "spot-test", ABOUT, format="pt")
    for read in (load_file(path), read_tensors(path)[0]):
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            torch.testing.assert_close(read[name], tensor, rtol=0, atol=0)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    assert read_tensors(path, "spot-test")[1] == ABOUT
    assert has_kind(path, "spot-test")
    assert not has_kind(path, "other")


def test_the_same_content_gives_the_same_bytes(tmp_path):
    one, two = {"b": torch.ones(2), "a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.ones(2)}
    write_tensors(tmp_path / "1", one, "k", {"y": 1, "x": 2}, format="pt", other="x")
    write_tensors(tmp_path / "2", two, "k", {"x": 2, "y": 1}, other="x", format="pt")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_every_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.rand(6)}, "spot-test", ABOUT)
    good = path.read_bytes()
    name = good.find(b"sha256")  # under another name it is no checksum, and none is compared
    harmless = {*range(name, name + 6), *(place for place in range(len(good)) if good[place : place + 1] == b" ")}
    sentences = set()
    for place in sorted({*range(len(good))} - harmless):
        for bit in (0, 5):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
            with pytest.raises(InputError) as raised:
                read_tensors(path, "spot-test", "a test")
            sentences.add(str(raised.value))
    assert all("x.safetensors" in sentence and "\n" not in sentence for sentence in sentences)


def test_files_of_others_are_read_without_a_checksum(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"spot-test": "[1]"})
    assert read_tensors(tmp_path / "x.safetensors")[0]["a"].tolist() == [1, 1]
    with pytest.raises(InputError, match="not a JSON object"):
        read_tensors(tmp_path / "x.safetensors", "spot-test")
    with pytest.raises(InputError, match="its header has no 'spot-other'"):
        read_tensors(tmp_path / "x.safetensors", "spot-other")


def test_names_survive_as_bytes():
    keys = ["a/b.JPEG", "ä/ç.png", os.fsdecode(b"caf\xe9.png")]
    assert decode_names(encode_names(keys)) == keys


# Content


def test_hashes_change_with_content_only(tmp_path, nano):
    values = torch.rand(5, 2)
    other = values.clone()
    other[3, 1] += 1e-6
    hashes = [
        hash_tensors({"a": values}),
        hash_tensors({"a": other}),
        hash_tensors({"b": values}),
        hash_tensors({"a": values.flatten()}),
        hash_tensors({"a": values}, 3),
    ]
    assert len(set(hashes)) == 5
    assert hash_tensors({"a": values, "b": other}) == hash_tensors({"b": other, "a": values.clone()})
    assert hash_json({"a": 1, "b": [2]}) == hash_json({"b": [2], "a": 1}) != hash_json({"a": 1, "b": [3]})
    (tmp_path / "x").write_bytes(b"abc")
    assert hash_file(tmp_path / "x") == "ba7816bf8f01cfea"  # FIPS 180-2's example


def test_a_models_hash_changes_with_any_weight_and_with_sigma(nano):
    before = hash_model(nano)
    assert before == hash_model(nano)
    nano.sigma = 0.9
    assert before != hash_model(nano)
    nano.sigma = 0.8
    with torch.no_grad():
        nano.vit.blocks[1].mlp.fc2.bias[3] += 1e-6
    assert hash_model(nano) != before


def test_the_first_difference_is_named():
    refuse_difference("x", {"a": {"b": 1}}, {"a": {"b": 1}})
    with pytest.raises(InputError, match=r"x was made with a.b=1, now a.b=2; choose another"):
        refuse_difference("x", {"a": {"b": 1}}, {"a": {"b": 2}, "c": 3}, "choose another")
    with pytest.raises(InputError, match=r"c=None, now c=3"):
        refuse_difference("x", {"a": 1}, {"a": 1, "c": 3})


def test_locks_of_long_names_that_begin_alike_are_different(tmp_path):
    name = "placements-of-vit_tiny_patch16_224-augreg_in21k_ft_in1k-seed-{}.safetensors"
    with locked(tmp_path / name.format(0)), locked(tmp_path / name.format(1)):
        assert len(names(tmp_path)) == 2
    assert not names(tmp_path)


def test_an_open_file_of_the_process_is_added_to(tmp_path):
    (tmp_path / "log.txt").write_text("old\n")
    with (tmp_path / "log.txt").open("a") as log:
        write_json(f"/dev/fd/{log.fileno()}", [1])
    assert (tmp_path / "log.txt").read_text() == "old\n[\n  1\n]\n"
