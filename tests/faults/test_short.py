"""The campaign of `make faults` in a short form: some of each kind of case, none of which may be a fault."""

import pytest

from tests.faults.calls import calls, command_line
from tests.faults.disturb import full_disks, kills, may_mount, races
from tests.faults.harness import Tally
from tests.faults.jobs import images, jobs
from tests.faults.mutations import formats, mutate
from tests.faults.prepare import prepared


@pytest.fixture
def tally():
    tally = Tally()
    yield tally
    assert tally.cases
    assert tally.faults == []


@pytest.mark.parametrize(("name", "every"), [("files", 7), ("search", 11), ("maps", 23), ("banks", 9), ("train", 31)])
def test_work_that_was_killed_goes_on_to_the_same_result(name, every, tally, tmp_path):
    """The long form kills before every operation."""
    assert kills(name, jobs(images(tmp_path / "pictures"))[name], tally, tmp_path, every=every, first=3) > every


def test_two_processes_in_one_folder_do_not_mix(tally, tmp_path):
    job = jobs(images(tmp_path / "pictures"))["search"]
    races("search", (job, job), tally, tmp_path, 2)


def test_a_full_disk_is_one_sentence_and_with_room_work_goes_on(tally, tmp_path):
    if not may_mount():
        tally.count("full disk", "fine")
        pytest.skip("no tmpfs can be mounted here")
    work = jobs(images(tmp_path / "pictures"))
    full_disks("search", work["search"], tally, tmp_path, [8])
    full_disks("train", work["train"], tally, tmp_path, [64])


def test_damaged_files_of_every_format(tally, tmp_path):
    for name, good in formats(tmp_path).items():
        mutate(name, good, tally, tmp_path, range(30))
    refused = sum(tally.refused.values())
    assert refused > 100  # not all were harmless


def test_calls_of_the_public_api(tally):
    calls(tally, 40)


def test_command_lines(tally, tmp_path):
    command_line(tally, tmp_path, prepared(tmp_path), 30)
