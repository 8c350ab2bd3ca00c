import numpy as np
import torch
from PIL import Image

from spot.plots import save
from tools.scenes import contact_sheet, main


def test_each_example_is_in_the_cell_of_its_row_and_column(tmp_path):
    # Two rows, three columns, two examples; each image is one grey level, its number times 20.
    levels = torch.arange(12).view(2, 3, 2) * 20
    images = (levels / 255)[..., None, None, None].expand(2, 3, 2, 3, 10, 10)
    figure = contact_sheet(images, ["a", "b"], ["x", "y", "z"])
    save(figure, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        pixels = np.asarray(image.convert("L")).astype(int)
    left, top = 80, 30  # room for the names
    for row in range(2):
        for column in range(3):
            for example in range(2):
                y = top + 2 * (row * 14 + 5)
                x = left + 2 * (column * 24 + example * 10 + 5)
                assert abs(pixels[y, x] - levels[row, column, example]) <= 1
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["x", "y", "z"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b"]


def test_a_sheet_has_every_class(tmp_path):
    main("scenes", tmp_path / "sheet.png", examples=2)
    with Image.open(tmp_path / "sheet.png") as image:
        # Twice enlarged: 4 cells of 2 × 64 pixels, 8 of 64, 4 between cells, and room for the names.
        assert image.size == (2 * (4 * 2 * 64 + 3 * 4) + 80, 2 * (8 * 64 + 7 * 4) + 30)
