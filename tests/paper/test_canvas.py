"""Photographs in a canvas of other images' texture."""

import numpy as np
import pytest
import torch
from PIL import Image

from paper.canvas import Canvas, CanvasSources, box_of
from paper.settings import StudySettings
from paper.sources import Sources
from spot.data.images import data_for
from spot.data.loader import loader
from tests.conftest import make_nano
from tests.data.files import cut_short

COLOURS = 24  # one image of each colour, so that every pixel of a canvas says whose it is


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for index in range(COLOURS):
        path = root / f"{index % 10}" / f"{index:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((40, 48, 3), 10 * index, np.uint8)).save(path)
    return root


def test_an_image_stands_whole_in_its_box_and_four_others_fill_the_rest(photos):
    model = make_nano()  # of 32 pixels
    plain, data = data_for(model, photos), Canvas(data_for(model, photos))
    for (image, label, key), (canvas, same_label, same_key) in zip(plain, data, strict=True):
        assert (label, key) == (same_label, same_key) and canvas.shape == (3, 64, 64)
        own = canvas == image[:, :1, :1]
        assert own[0].sum() == 32 * 32  # nowhere else
        top, left, bottom, right = (round(64 * at) for at in box_of(key))
        assert (bottom - top, right - left) in [(32, 32)]
        assert own[:, top:bottom, left:right].all()
        assert 1 <= len(canvas[0][~own[0]].unique()) <= 4


def test_a_canvas_depends_on_the_images_name_and_not_on_what_else_is_read(photos):
    model = make_nano()
    every = {key: canvas for canvas, _, key in Canvas(data_for(model, photos))}
    few = Canvas(data_for(model, photos, limit=5))
    for batch in loader(few, batch_size=2):
        for canvas, key in zip(batch.images, batch.keys, strict=True):
            assert torch.equal(canvas, every[key])
    boxes = torch.tensor([box_of(f"{index}.jpg")[:2] for index in range(400)])
    assert boxes.min() >= 0 and boxes.max() <= 0.5 and boxes.std(0).min() > 0.12  # 0.144 if uniform


def test_results_on_canvases_are_not_taken_for_those_on_the_images(photos):
    model = make_nano()
    settings = StudySettings(data=str(photos))
    assert CanvasSources(settings).images_hash(model) != Sources(settings).images_hash(model)


def test_a_damaged_image_in_the_texture_is_named_like_any_other(tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    cut_short(tmp_path / "b.jpg")
    data = Canvas(data_for(make_nano(), tmp_path, skip=True))
    assert [sample for sample in data if sample is not None] == []
