"""MACs against the paper's and published figures, and against sums done by hand."""

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spot
from spot.evaluation.cost import flops, macs, pyramid_flops
from spot.models.baselines import ElasticViT, PatchDropout
from spot.models.tome import ToMe
from spot.models.wrappers import PlainViT
from spot.tokens.pyramid import pyramid
from spot.tokens.windows import windows
from tests.conftest import make_nano


def test_vit_b16_has_its_published_multiply_adds():
    with torch.device("meta"):  # counting needs no numbers
        vit = timm.create_model("vit_base_patch16_224")
    model = spot.adapt(vit).to("meta")
    assert macs(PlainViT(model)) / 1e9 == pytest.approx(17.6, abs=0.05)  # DeiT's and timm's tables
    # The overhead of placing all 196 tokens off the grid: below 0.2 % of it.
    assert macs(PlainViT(model)) < macs(model) < 1.002 * macs(PlainViT(model))


@pytest.mark.parametrize("tokens", [25, 196])  # the ends of the paper's table of overhead
def test_the_papers_vit_b16_is_counted_to_the_last_digit(tokens):
    with torch.device("meta"):
        vit = timm.create_model("vit_base_patch16_224")
    model = spot.adapt(vit).to("meta")
    width, depth, sequence = 768, 12, tokens + 1
    patches, table, norms = width * (3 * 16**2 + 1), (1 + 196) * width, 2 * 2 * width
    block = 4 * width**2 + 4 * width + 8 * width**2 + 5 * width + norms  # attention, MLP, two norms
    head = 2 * width + 1000 * (width + 1)  # the last norm and the classifier
    parameters = patches + width + table + depth * block + head
    assert parameters == 86_567_656  # timm's own table: 86.57 M
    assert sum(each.numel() for each in model.parameters()) == parameters  # SPoT adds none
    placed = 196 * width + (14 + 14) ** 2  # a token's position: all cells' kernels, and one inverse for both axes
    products = depth * (12 * sequence * width**2 + 2 * sequence**2 * width)
    assert macs(model, tokens=tokens) == tokens * (3 * 16**2 * width + placed) + products + 1000 * width


def test_every_product_of_a_small_vit_by_hand():
    model = make_nano()  # width 32, MLP 128, 10 classes, 2 blocks; 192 pixels in a patch; 4 × 4 kernels
    tokens = 5
    embed = tokens * (192 * 32 + (4 + 4) ** 2 + 16 * 32)  # window, kernels along y and x at once, position
    block = (1 + tokens) * (3 * 32 * 32 + 32 * 32 + 2 * 32 * 128) + 2 * (1 + tokens) ** 2 * 32
    assert macs(model, tokens=tokens) == embed + 2 * block + 32 * 10
    assert flops(model, tokens=tokens) == 2 * macs(model, tokens=tokens)


def test_every_model_counts_its_own_budget():
    model = make_nano()
    model.tokens = 5
    assert macs(PatchDropout(model, 5)) == macs(model)
    assert macs(ElasticViT(model, 5)) > macs(model)  # and the pyramid that windows of other scales come from
    assert macs(ToMe(model, 0, own_placement=True)) == macs(model)
    assert macs(ToMe(model, 2, own_placement=True)) < macs(model)


def test_counting_follows_the_image_and_leaves_model_and_generator_as_they_were():
    model, before = make_nano().train(), torch.get_rng_state()
    assert macs(PatchDropout(model, 16), shape=(3, 64, 64)) == macs(PatchDropout(model, 16))
    assert macs(ToMe(model, 0), shape=(3, 64, 64)) > 4 * macs(ToMe(model, 0))
    macs(model, tokens=5)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


class Counter(TorchDispatchMode):
    """FLOPs of element-wise operators on floating-point numbers; a linear interpolation has three."""

    EACH = {"add": 1, "sub": 1, "rsub": 1, "mul": 1, "div": 1, "addcmul": 3, "addcdiv": 3, "lerp": 3}  # noqa: RUF012
    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        each = self.EACH.get(func.overloadpacket.__name__.rstrip("_"), 0)
        if each and result.is_floating_point():
            self.flops += each * result.numel()
        return result


@torch.no_grad()
def arithmetic(call):
    with Counter() as counter:
        call()
    return counter.flops


def test_a_window_is_read_with_less_arithmetic_than_the_paper_s_formula():
    """An interpolation is 3 FLOPs: (K + 1) × K of them across, then K × K down, for each channel."""
    images, positions = torch.rand(1, 3, 64, 64), torch.rand(1, 25, 2)
    counted = arithmetic(lambda: windows(images, positions, 16))
    samples = 25 * 3 * 3 * (17 * 16 + 16 * 16)
    assert samples <= counted < samples + 25 * 20  # and a few for each position
    assert counted < 25 * 16**2 * (7 * 3 + 8)  # the paper's formula


def test_the_pyramid_of_large_windows_is_counted():
    model = make_nano(img_size=64)
    model.tokens = 4
    plain = flops(model)
    model.scale = 3.0  # between levels 1 and 2
    image = torch.rand(1, 3, 64, 64)
    built = arithmetic(lambda: pyramid(image, 2))
    assert flops(model) - plain == pyramid_flops((3, 64, 64), 3.0) == built == 3 * (64 * 64 + 32 * 32)
    assert pyramid_flops((3, 224, 224), 1.0) == 0


@pytest.mark.parametrize("name", ["salient", "focus", "background"])
def test_a_prior_that_needs_maps_has_a_cost(name):
    """A blank image's map left `background` no pixel, so that no evaluation with it came to its end."""
    model = spot.load("scenes-a", tokens=9)
    assert flops(model.at(prior=name)) > flops(model.at(prior="isotropic"))  # looking costs too
