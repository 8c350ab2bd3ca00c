"""The finder: a policy for large pictures."""

import pytest
import torch
from torch import Tensor

import spot
from spot.errors import InputError
from spot.placement.finder import CELL, REFERENCE_SIZE, Finder
from spot.placement.glimpses import cut_out
from spot.placement.policy import build_policy, read_policy_file
from tests.tokens.test_regions import NANO


@pytest.fixture
def finder() -> Finder:
    torch.manual_seed(0)
    return Finder(8, longest=64, width=4, body=8).eval()


def drawn(rows: int, columns: int, *peaks: tuple[float, ...]) -> Tensor:
    """Maps (1, 4, rows, columns) with a logit, log size, y and x at (row, column) of each peak."""
    maps = torch.zeros(1, 4, rows, columns)
    maps[:, 0] = -9
    for row, column, *values in peaks:
        maps[0, :, int(row), int(column)] = torch.tensor(values)
    return maps


def test_the_highest_peaks_become_glimpses_at_their_places(finder):
    images = torch.zeros(1, 3, 64, 128)  # seen as 32 × 64: a cell is 16 pixels
    maps = drawn(4, 8, (1, 2, 2.0, 0.0, 0.25, -0.5), (3, 6, 3.0, 0.5, 0.0, 0.0))
    glimpses, scores = finder.first_stage(maps, images, 2)
    side = 1.25 * REFERENCE_SIZE * 2
    wanted = torch.tensor(
        [[3.5 * 16 / 64, 6.5 * 16 / 128, side * 2.718281828**0.5], [1.75 * 16 / 64, 2 * 16 / 128, side]]
    )
    torch.testing.assert_close(glimpses[0], wanted)
    torch.testing.assert_close(scores[0], torch.tensor([3.0, 2.0]).sigmoid())


def test_neighbours_of_a_peak_are_no_places_of_their_own(finder):
    maps = drawn(4, 8, (1, 2, 5.0, 0, 0, 0), (1, 3, 4.0, 0, 0, 0), (3, 7, 1.0, 0, 0, 0))
    glimpses, _ = finder.first_stage(maps, torch.zeros(1, 3, 64, 128), 2)
    assert glimpses[0, :, 1].tolist() == [2.5 / 8, 7.5 / 8]


@pytest.mark.parametrize("size", [(64, 64), (37, 90), (200, 130), (1000, 640)])
def test_it_places_tokens_in_pictures_of_any_size(finder, size):
    images = torch.randn(2, 3, *size)
    positions = finder(images, 9)
    assert positions.shape == (2, 9, 7)
    torch.testing.assert_close(positions[0], finder(images[:1], 9)[0])
    assert finder.maps(images).shape[-2:] == tuple(-(-side // CELL) for side in finder.input_size(images))


@pytest.mark.parametrize("size", [(64, 128), (48, 128), (96, 192)])
def test_it_sees_means_of_whole_pixels(finder, size):
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    step = size[1] // 64
    wanted = torch.nn.functional.avg_pool2d(images, step)
    torch.testing.assert_close(finder.downscaled(images), wanted)


def test_a_model_with_a_finder_predicts_saves_and_loads(finder, tmp_path):
    model = spot.adapt("vit_tiny_patch16_224", tokens=9, **NANO).eval()
    model.prior = finder
    images = torch.randn(1, 3, 70, 90)
    wanted = model(images)
    torch.testing.assert_close(wanted, model(images, finder(images, 9)))
    model.save_pretrained(tmp_path / "model")
    again = spot.load(tmp_path / "model")
    assert again.prior == "learned"
    torch.testing.assert_close(again(images), wanted)


@pytest.mark.parametrize("candidates", [0, 5])
def test_a_finder_survives_its_file_and_older_files_have_no_second_stage(candidates, tmp_path):
    finder = Finder(8, longest=64, width=4, body=8, candidates=candidates).eval()
    finder.save(tmp_path / "finder.safetensors")
    images = torch.randn(1, 3, 70, 90)
    torch.testing.assert_close(read_policy_file(tmp_path / "finder.safetensors")(images, 9), finder(images, 9))
    about = finder.describe()
    assert build_policy(about).describe() == about
    del about["options"]["candidates"]
    assert build_policy(about).candidates == 0


class Redness(torch.nn.Module):
    """A second stage that likes red: 20 times the mean of that channel."""

    def forward(self, views: Tensor) -> Tensor:
        return 20 * views[:, 0].mean((1, 2))


def test_the_second_stage_orders_the_candidates():
    finder = Finder(8, longest=64, width=4, body=8, candidates=2).eval()
    finder.look.second = Redness()
    images = torch.zeros(1, 3, 64, 128)
    images[:, 0, 40:64, 80:128] = 1  # around row 3, column 6, where a cell is 16 pixels
    small = -1.5  # log size: 4.5 of the shrunk picture's pixels, 9 of the picture's
    peaks = ((1, 2, 2.0, small, 0, 0), (3, 6, 1.0, small, 0, 0), (0, 7, 0.5, small, 0, 0))
    maps = drawn(4, 8, *peaks)
    glimpses, scores = finder.detect(maps, images, 2)
    assert glimpses[0, :, 1].tolist() == [6.5 / 8, 2.5 / 8]  # the red one first
    torch.testing.assert_close(scores[0], torch.tensor([1.0 + 20, 2.0]).sigmoid())
    third = finder.detect(maps, images, 3).glimpses[0, :, 1]
    assert third.tolist() == [6.5 / 8, 2.5 / 8, 7.5 / 8]  # more places than candidates were asked for


def test_the_second_stage_sees_twice_the_size_of_a_candidate():
    finder = Finder(8, longest=64, width=4, body=8, candidates=2).eval()
    picture = torch.randint(256, (3, 90, 130), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    glimpses = torch.tensor([[[40.3 / 90, 61.7 / 130, 1.25 * 20]]])
    seen = finder.candidate_views(picture.float()[None], glimpses)[0, 0]
    torch.testing.assert_close(seen, cut_out(picture, 40.3, 61.7, 2 * 20, 32), atol=1e-2, rtol=0)


def test_what_no_place_can_be_found_in_gets_a_sentence(finder):
    with pytest.raises(InputError, match="4 × 90 pixels is smaller than one token"):
        finder(torch.zeros(1, 3, 4, 90), 9)
    with pytest.raises(InputError, match="20 × 2000 pixels is too long to find places in"):
        finder(torch.zeros(1, 3, 20, 2000), 9)
    with pytest.raises(InputError, match="1000 places are more than the map's 64 cells"):
        finder.find(torch.zeros(1, 3, 64, 64), 1000)
    with pytest.raises(InputError, match="trained for 3 tokens and more"):
        Finder(8, longest=64, glimpses=3)(torch.zeros(1, 3, 64, 64), 2)
