"""A smaller image against timm's own model of that image size, and torchvision's own shrinking."""

import pytest
import timm
import torch
from torchvision.transforms.v2.functional import resize

from paper.backbone import shrinkable
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.models.baselines import BASELINES
from spot.models.resize import Resize, small_grid
from tests.conftest import make_nano


def pictures(height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_it_is_timm_s_model_of_the_smaller_image():
    model = make_nano()
    with torch.no_grad():
        model.vit.pos_embed.zero_()  # timm resamples the table in its own way
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    small = timm.create_model("vit_tiny_patch16_224", **shape).eval()
    small.load_state_dict({**model.vit.state_dict(), "pos_embed": torch.zeros(1, 5, 32)})
    expected = small(resize(pictures(), [16, 16], interpolation=3, antialias=True))
    torch.testing.assert_close(Resize(model, 4)(pictures()), expected, rtol=1e-4, atol=1e-5)


def test_with_all_tokens_it_is_the_vit_itself():
    model = make_nano()
    torch.testing.assert_close(Resize(model, 16)(pictures()), model.vit(pictures()), rtol=1e-4, atol=1e-5)


def test_its_tokens_stand_in_the_middle_of_their_share_of_the_image():
    positions = Resize(make_nano(), 4).place(pictures())
    expected = torch.tensor([[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]])
    torch.testing.assert_close(positions, expected.expand(2, -1, -1))


@pytest.mark.parametrize(
    "tokens, size, grid", [(49, (224, 224), (7, 7)), (24, (240, 160), (6, 4)), (12, (32, 32), (3, 4))]
)
def test_rows_and_columns_follow_the_aspect(tokens, size, grid):
    assert small_grid(tokens, *size) == grid


def test_a_number_without_such_a_grid_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="has 10 patches in rows and columns; the nearest number is 9"):
        Resize(make_nano(), 10)
    with pytest.raises(InputError, match="at most the 16 patches"):
        Resize(make_nano(), 25)


def test_it_costs_what_as_many_placed_tokens_cost():
    model = make_nano()
    assert macs(BASELINES["resize"].build(model, 9)) == macs(model.at(tokens=9))


def test_budgets_that_have_a_smaller_image_are_those_that_build():
    model = make_nano(img_size=64)
    fitting = [tokens for tokens in range(1, 64) if builds(model, tokens)]
    assert shrinkable(model, range(1, 70)) == fitting and {4, 9, 16, 25, 36, 49} <= set(fitting)


def builds(model, tokens):
    try:
        Resize(model, tokens)
    except InputError:
        return False
    return True
