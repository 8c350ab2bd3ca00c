"""The README's street, in small."""

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle
from PIL import Image

from spot.models.glimpsed import Glimpsed
from spot.placement.finder import Finder
from spot.placement.glimpses import cut_out
from tests.conftest import make_nano
from tools.street import seen, street


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = make_nano(num_classes=3).at(tokens=4)
    model.class_names = ["danger", "none", "other"]
    model.prior = Finder(model.patch_size, longest=64, width=4, body=8, about={"made": {"none": "none"}}).eval()
    return model


def test_a_street_has_its_places_what_tokens_saw_and_the_predictions(model, tmp_path):
    photo = tmp_path / "val" / "danger" / "1.png"
    photo.parent.mkdir(parents=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 136, 3), np.uint8)).save(photo)
    study = {"keys": ["val/none/0.png", "val/danger/1.png"], "predicted": {"frozen: all patches": ["none", "other"]}}
    wide, *cells, answers = street(model, photo, study).axes
    assert wide.get_title() == "136 × 80 pixels: 12 tokens on 3 places"
    assert len([patch for patch in wide.patches if isinstance(patch, Rectangle)]) == len(cells) == 3
    for cell in cells:
        name, percent = cell.get_title().rsplit(" ", 2)[0], cell.get_title().rsplit(" ", 2)[1]
        assert name in model.class_names and 0 <= int(percent) <= 100
    texts = [text.get_text() for text in answers.texts]
    assert texts[0].startswith("12 placed tokens: ") and texts[1] == "all 4,250 patches: other"


def test_an_inset_is_what_the_tokens_of_a_place_see(model):
    picture = torch.randint(256, (3, 80, 136), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    several, size = Glimpsed(model), 2 * model.patch_size
    mean, std = (torch.tensor(model.data_config[name])[:, None, None] for name in ("mean", "std"))
    view = seen(several, ((picture / 255 - mean) / std)[None], torch.tensor([[[30 / 80, 50 / 136, 24.0]]]))
    torch.testing.assert_close(view, cut_out(picture, 30.0, 50.0, 24.0, size) / 255, atol=1e-4, rtol=0)
