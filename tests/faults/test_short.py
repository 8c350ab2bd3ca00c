"""The campaign of `make faults` in a short form: some of each kind of case, none of which may be a fault."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from tests.faults.calls import calls, command_line
from tests.faults.disturb import full_disks, kills, may_mount, races
from tests.faults.harness import Tally
from tests.faults.jobs import images, jobs
from tests.faults.mutations import formats, mutate


@pytest.fixture
def tally():
    tally = Tally()
    yield tally
    assert tally.cases
    assert tally.faults == []


@pytest.fixture(scope="module")
def elsewhere():
    """A new process that runs a function. Where autograd has run, as in other tests, a forked process cannot use it."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield lambda work, *given: pool.submit(work, *given).result()


def killed(name, every, folder):
    tally = Tally()
    operations = kills(name, jobs(images(folder / "pictures"))[name], tally, folder, every=every, first=3)
    return tally, operations


def raced(folder):
    tally, job = Tally(), jobs(images(folder / "pictures"))["search"]
    races("search", job, tally, folder, 2)
    return tally


def filled(folder):
    tally, work = Tally(), jobs(images(folder / "pictures"))
    full_disks("search", work["search"], tally, folder, [8])
    full_disks("train", work["train"], tally, folder, [64])
    return tally


@pytest.mark.parametrize(
    ("name", "every"), [("files", 7), ("search", 11), ("maps", 23), ("features", 9), ("train", 31)]
)
def test_work_that_was_killed_goes_on_to_the_same_result(name, every, elsewhere, tmp_path):
    """The long form kills before every operation."""
    tally, operations = elsewhere(killed, name, every, tmp_path)
    assert operations > every
    assert tally.cases and tally.faults == []


def test_two_processes_in_one_folder_do_not_mix(elsewhere, tmp_path):
    tally = elsewhere(raced, tmp_path)
    assert tally.cases and tally.faults == []


def test_a_full_disk_is_one_sentence_and_with_room_work_goes_on(elsewhere, tmp_path):
    if not may_mount():
        pytest.skip("no tmpfs can be mounted here")
    tally = elsewhere(filled, tmp_path)
    assert tally.cases and tally.faults == []


def test_damaged_files_of_every_format(tally, tmp_path):
    for name, good in formats(tmp_path).items():
        mutate(name, good, tally, tmp_path, range(30))
    refused = sum(tally.refused.values())
    assert refused > 100  # not all were harmless


def test_calls_of_the_public_api(tally):
    calls(tally, 40)


def test_command_lines(tally, tmp_path):
    command_line(tally, tmp_path, 30)
