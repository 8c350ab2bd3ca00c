"""The figures of the README and the guides, in small."""

import numpy as np
import pytest
import torch
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from PIL import Image

from spot.placement.finder import Finder
from tests.conftest import make_nano
from tools import figures


@pytest.fixture(scope="module")
def model():
    return make_nano(num_classes=1000)


def test_a_photograph_has_the_grid_the_windows_what_they_cover_and_three_answers(model):
    figure = figures.photograph(model, model, figures.IMAGES / "photos" / "coffee.jpg")
    dense, free, visible, answers = figure.axes
    windows = [[each for each in axes.collections if isinstance(each, PatchCollection)] for axes in (dense, free)]
    assert [len(each[-1].get_paths()) for each in windows] == [16, 25]  # a grid of 4 × 4; the budget
    assert visible.get_title().startswith("all that they cover")
    bold = [text.get_text() for text in answers.texts if text.get_fontweight() == "bold"]
    assert bold == ["the ViT, 16 patches", "the ViT, the 25 windows", "retrofitted, the 25 windows"]
    assert len(answers.patches) == 6  # two classes each


def test_the_other_figures_of_photographs_are_drawn(model, monkeypatch):
    monkeypatch.setattr(figures, "STEPS", 2)
    cat, _, rocket = sorted((figures.IMAGES / "photos").glob("*.jpg"))
    places, ways, worse = figures.gallery(model, model, [cat]).subfigs
    assert [axes.get_title().split(":")[0] for axes in places.axes] == list(figures.PRIORS)
    assert len(ways.axes) == 4 and len(worse.axes) == 1
    assert len(figures.fits(model, rocket, 9).axes) == 3
    alike = figures.alike(model, [cat, rocket], side=8).axes
    assert alike[1].get_title() == alike[5].get_title() == "how like it: up to 1.00"  # a point is most like itself


@pytest.fixture
def finding():
    torch.manual_seed(0)
    model = make_nano(num_classes=3).at(tokens=4)
    model.class_names = ["danger", "none", "other"]
    model.prior = Finder(model.patch_size, longest=64, width=4, body=8, about={"made": {"none": "none"}}).eval()
    return model


def test_a_street_has_its_places_what_tokens_saw_and_the_predictions(finding, tmp_path):
    photo = tmp_path / "val" / "danger" / "1.png"
    photo.parent.mkdir(parents=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 136, 3), np.uint8)).save(photo)
    study = {"keys": ["val/none/0.png", "val/danger/1.png"], "predicted": {"frozen: all patches": ["none", "other"]}}
    wide, *cells, answers = figures.draw_street(finding, photo, study).axes
    assert wide.get_title() == "136 × 80 pixels: 12 tokens on 3 places"
    assert len([patch for patch in wide.patches if isinstance(patch, Rectangle)]) == len(cells) == 3
    for cell in cells:
        name, percent = cell.get_title().rsplit(" ", 2)[0], cell.get_title().rsplit(" ", 2)[1]
        assert name in finding.class_names and 0 <= int(percent) <= 100
    texts = [text.get_text() for text in answers.texts]
    assert texts[0].startswith("12 placed tokens: ") and texts[1] == "all 4,250 patches: other"
