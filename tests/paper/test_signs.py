"""The study of signs: what each row sees, on made-up streets."""

from pathlib import Path

import numpy as np
import pytest
import torch

from paper.signs import SEEN, Shrunk, Street, cut, normal
from spot.data.pictures import Pictures


@pytest.fixture
def street(tmp_path):
    """Two streets of 800 × 1360 pixels: one with a white sign of 40 pixels at (300, 500), one without."""
    empty, sign = torch.full((3, 800, 1360), 60, dtype=torch.uint8), torch.full((3, 800, 1360), 60, dtype=torch.uint8)
    sign[:, 280:320, 480:520] = 255
    read = {"sign": sign, "empty": empty}
    pictures = Pictures(Path(), ["sign", "empty"], [1, 0], ["none", "stop"], read)
    return Street(
        pictures, pictures, {"sign": torch.tensor([[300.0, 500, 40, 1]]), "empty": torch.zeros(0, 4)}, tmp_path
    )


@pytest.mark.parametrize("name", [name for name in SEEN if "U²" not in name])
def test_every_row_has_the_tokens_that_its_table_says(street, name):
    tokens, see = SEEN[name]
    images, positions = see(street, "sign", street.val.pixels(0))
    rows, columns = (length // 16 for length in images.shape[-2:])
    assert (rows * columns if positions is None else positions.shape[1]) == tokens


def test_a_told_glimpse_is_on_the_sign_and_elsewhere_where_another_picture_has_one(street):
    expected = torch.tensor([[[300 / 800, 500 / 1360, 50.0]]])  # with a margin of a quarter
    torch.testing.assert_close(street.told("sign", street.val.pixels(0)), expected)
    torch.testing.assert_close(street.told("empty", street.val.pixels(1)), expected)  # there is one sign in all
    torch.testing.assert_close(street.chance("empty", street.val.pixels(1)), expected)


def test_a_crop_has_the_sign_in_its_middle(street):
    part = cut(street.val.pixels(0), torch.tensor([[[300 / 800, 500 / 1360, 50.0]]]), 100)
    assert part.shape == (1, 3, 100, 100)
    assert float(part[0, 0, 50, 50]) == pytest.approx(1.0)  # white
    assert float(part[0, 0, 3, 3]) == pytest.approx(60 / 127.5 - 1, abs=1e-6)


def test_views_of_shrunk_pictures_fill_whole_patches(street):
    views, labels = Shrunk(street.train, 160).batch([0, 1], np.random.default_rng(0))
    assert views.shape == (2, 3, 96, 160) and labels.tolist() == [1, 0]
    assert float(views[1].std()) < 1e-6 < float(views[0].std())  # the sign is still there, the empty street has none
    assert normal(street.val.pixels(0)).shape == (1, 3, 800, 1360)
