"""The study of signs: what each row sees, on made-up streets."""

from pathlib import Path

import numpy as np
import pytest
import torch

from paper.signs import INPUTS, Shrunk, Street, cut, normal
from spot.data.large_pictures import LargePictures
from spot.placement.glimpses import glimpse_positions
from spot.tokens.windows import windows


@pytest.fixture
def street(tmp_path):
    """Two streets of 800 × 1360 pixels: one with a white sign of 40 pixels at (300, 500), one without."""
    empty, sign = torch.full((3, 800, 1360), 60, dtype=torch.uint8), torch.full((3, 800, 1360), 60, dtype=torch.uint8)
    sign[:, 280:320, 480:520] = 255
    read = {"sign": sign, "empty": empty}
    pictures = LargePictures(Path(), ["sign", "empty"], [1, 0], ["none", "stop"], read)
    places = {"sign": torch.tensor([[300.0, 500, 40, 1]]), "empty": torch.zeros(0, 4)}
    return Street(pictures, pictures, places, tmp_path, lambda images: images.mean(1))


@pytest.mark.parametrize("name", INPUTS)
def test_every_row_has_the_tokens_that_its_table_says(street, name):
    tokens, see = INPUTS[name]
    images, positions = see(street, "sign", street.val.pixels(0))
    rows, columns = (length // 16 for length in images.shape[-2:])
    assert (rows * columns if positions is None else positions.shape[1]) == tokens


def test_a_told_glimpse_is_on_the_sign_and_elsewhere_where_another_picture_has_one(street):
    expected = torch.tensor([[[300 / 800, 500 / 1360, 50.0]]])  # with a margin of a quarter
    torch.testing.assert_close(street.on_sign("sign", street.val.pixels(0)), expected)
    torch.testing.assert_close(street.on_sign("empty", street.val.pixels(1)), expected)  # there is one sign in all
    torch.testing.assert_close(street.at_random("empty", street.val.pixels(1)), expected)


def test_a_told_region_and_its_crop_show_the_same_pixels(street):
    """The crop ends where the window samples go on into the street: they differ by half of a sample at its border."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (3, 800, 1360), dtype=torch.uint8, generator=draw)
    for place in ([300.4, 500.7, 41.3, 1], [9.0, 1352.0, 33.0, 1], [640.2, 77.7, 88.8, 1]):
        street.places["sign"] = torch.tensor([place])
        glimpse = street.on_sign("sign", pixels)
        assert (glimpse[0, 0, :2] * torch.tensor([800, 1360])).frac().abs().max() < 1e-3  # between whole pixels
        images = normal(pixels)
        read = windows(images, glimpse_positions(images, glimpse, 49, 16), 16)[0]
        read = read.unflatten(0, (7, 7)).permute(2, 0, 3, 1, 4).reshape(3, 112, 112)
        edge = 4
        inner = (slice(None), slice(edge, -edge), slice(edge, -edge))
        torch.testing.assert_close(read[inner], cut(pixels, glimpse, 112)[0][inner], atol=1e-3, rtol=0)


def test_views_of_shrunk_pictures_fill_whole_patches(street):
    views, labels = Shrunk(street.train, 160).batch([0, 1], np.random.default_rng(0))
    assert views.shape == (2, 3, 96, 160) and labels.tolist() == [1, 0]
    assert float(views[1].std()) < 1e-6 < float(views[0].std())  # the sign is still there, the empty street has none
    assert normal(street.val.pixels(0)).shape == (1, 3, 800, 1360)
