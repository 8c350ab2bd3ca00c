import torch

from spot.data.scenes import Scenes
from spot.data.shapes import OUTLINES, TEXTURES
from tools.scenes import EXAMPLES, contact_sheet


def test_every_class_has_its_cell_with_examples():
    cells = contact_sheet("scenes").axes
    classes = len(OUTLINES) * len(TEXTURES)
    assert len(cells) == classes
    assert [axes.get_ylabel() for axes in cells[:: len(TEXTURES)]] == list(OUTLINES)
    assert [axes.get_title() for axes in cells[: len(TEXTURES)]] == list(TEXTURES)
    drawn = Scenes("train", classes * EXAMPLES).draw([9, 9 + classes, 9 + 2 * classes]).images
    expected = torch.cat([*drawn], 2).permute(1, 2, 0)
    torch.testing.assert_close(torch.tensor(cells[9].images[0].get_array()), expected)
