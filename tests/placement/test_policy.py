"""A policy looks at the image and places tokens by its map."""

import copy

import pytest
import torch
import torch.nn.functional as F

import spot
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.models.protocol import Placed
from spot.placement.policy import LOOKS, Policy, between, load_policy
from spot.placement.priors import focus, isotropic, spread


@pytest.fixture(scope="module")
def model():
    return spot.load("scenes-a")


@pytest.fixture
def images():
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def random_policy(model, look, **options):
    """A policy whose map is not flat."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Policy(model, look, **options)
        for weight in policy.look.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return policy


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("tokens", [4, 7, 25])
def test_a_policy_gives_so_many_tokens_inside_the_image(model, images, look, tokens):
    positions = random_policy(model, look)(images, tokens)
    assert positions.shape == (3, tokens, 2)
    assert (positions >= 0.5 / 64).all() and (positions <= 1 - 0.5 / 64).all()


@pytest.mark.parametrize("look", LOOKS)
def test_maps_are_densities_over_any_shape_of_image(model, look):
    maps = random_policy(model, look).maps(torch.randn(2, 3, 64, 96))
    assert maps.shape[1] == maps.shape[2]
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(2))
    assert not torch.allclose(maps[0], maps[1])


def test_a_new_policy_has_a_flat_map_and_is_isotropic(model, images):
    torch.testing.assert_close(Policy(model)(images, 16), isotropic(images, 16))


@pytest.mark.parametrize("look", LOOKS)
def test_with_as_many_tokens_as_cells_a_policy_is_the_grid(model, images, look):
    positions = random_policy(model, look)(images, len(model.grid()))
    torch.testing.assert_close(positions, model.grid(images))


def test_tokens_go_where_the_map_is(model, images):
    maps = torch.full((3, 16, 16), 1e-6)
    maps[0, :8, :8] = maps[1, 8:, :8] = maps[2, 8:, 8:] = 1 / 64
    positions = Policy(model, strength=0.9).place(maps, images, 16)
    corners = torch.tensor([[0.25, 0.25], [0.75, 0.25], [0.75, 0.75]])
    near = ((positions - corners[:, None]).abs() < 0.25).all(-1).sum(1)
    # By hand: strength fades to 0.9 · (1 − 16 / 64) = 0.675, and a quarter of the rest of the area is there too.
    assert near.tolist() == [12, 12, 12]


def test_spread_with_half_the_strength_is_focus(images):
    maps = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1))
    smooth = maps.double()
    for axis in (1, 2):  # a slow mean over the 9 pixels around each, fewer at the edges
        rows = [smooth.narrow(axis, max(0, i - 4), min(64, i + 5) - max(0, i - 4)).mean(axis) for i in range(64)]
        smooth = torch.stack(rows, axis)
    mine = spread(smooth / smooth.sum((1, 2), keepdim=True), 0.5, images, 9)
    torch.testing.assert_close(mine, focus(images, 9, maps=maps))


def test_positions_have_a_gradient_in_the_map(images):
    density = torch.rand(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    density = (density / density.sum((1, 2), keepdim=True)).requires_grad_()
    shape = images[:2].double()

    def places(each):
        return spread(each, 0.7, shape, 5)

    ours = torch.autograd.grad(places(density).double().sum(), density)[0]
    for index in [(0, 1, 2), (1, 4, 3)]:
        step = torch.zeros_like(density)
        step[index] = 1e-3
        slope = (places(density + step).double().sum() - places(density - step).double().sum()) / 2e-3
        torch.testing.assert_close(ours[index], slope, rtol=2e-2, atol=2e-3)


def test_sizes_are_smaller_where_the_map_is_high(model, images):
    maps = torch.full((3, 16, 16), 1e-6)
    maps[:, :8] = 1 / 128
    positions = Policy(model, strength=0.6, sizes=1.0).place(maps, images, 9)
    top = positions[..., 0] < 0.5
    assert positions.shape == (3, 9, 3)
    assert positions[top][:, 2].max() < positions[~top][:, 2].min()


def test_a_policy_is_a_prior_by_itself_by_name_and_by_file(model, images, tmp_path):
    own = copy.deepcopy(model)
    policy = random_policy(own, "thumbnail")
    expected = policy(images, 9)
    policy.save(tmp_path / "p.safetensors")
    own.tokens = 9
    own.prior = policy
    torch.testing.assert_close(own.place(images), expected)
    assert not own.random
    own.prior, own.policy = "learned", policy
    torch.testing.assert_close(own.place(images, keys=["a", "b", "c"]), expected)
    torch.testing.assert_close(own.place(images, prior=str(tmp_path / "p.safetensors")), expected)
    own.policy = tmp_path / "p.safetensors"
    torch.testing.assert_close(own.place(images), expected)


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_saved_is_what_is_loaded(model, images, look, tmp_path):
    policy = random_policy(model, look, side=3 if look == "tokens" else 32, strength=0.5, fewest=6)
    policy.save(tmp_path / "p.safetensors")
    again = load_policy(tmp_path / "p.safetensors", model)
    torch.testing.assert_close(again(images, 8), policy(images, 8), rtol=0, atol=0)
    assert again.describe() == policy.describe()


def test_a_policy_goes_to_disk_and_comes_back_with_its_model(model, images, tmp_path):
    own = copy.deepcopy(model)
    own.policy, own.prior, own.tokens = random_policy(own, "tokens"), "learned", 9
    own.save_pretrained(tmp_path / "model")
    again = spot.load(tmp_path / "model")
    torch.testing.assert_close(again(images), own(images))


def test_the_cost_of_looking_is_counted(model, images):
    plain, looking = (macs(Placed(model, 9, prior)) for prior in ("isotropic", Policy(model, side=32)))
    # By hand, width 32: two strided convolutions, one to 4 × 4, three blocks of 64 and one of 32 channels, head.
    first = 16 * 16 * 27 * 16 + 8 * 8 * (16 * 9) * 32 + 4 * 4 * (32 * 9) * 64
    blocks = 3 * 16 * (64 * 25 + 2 * 64 * 128) + 64 * (32 * 25 + 2 * 32 * 64)
    finer = 32 * 8 * 8 + 32 * 8 * 32  # a map of 8 × 8 interpolated to 32 × 32, an axis at a time
    assert looking - plain == first + blocks + 16 * 64 * 32 + 64 * 32 + finer


@pytest.mark.parametrize("rows, columns", [(6, 6), (3, 5)])
def test_interpolation_is_that_of_torch(rows, columns):
    maps = torch.rand(2, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    finer = [torch.arange(length * 4) / 4 + 0.125 for length in (rows, columns)]
    ours = between(finer[0], rows) @ maps @ between(finer[1], columns).mT
    theirs = F.interpolate(maps[:, None], scale_factor=4.0, mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(ours, theirs)
    at = torch.rand(2, 7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = ((between(at[..., 0] * rows, rows) @ maps) * between(at[..., 1] * columns, columns)).sum(-1)
    grid = at[:, None].flip(-1) * 2 - 1
    theirs = F.grid_sample(maps[:, None], grid, align_corners=False, padding_mode="border")[:, 0, 0]
    torch.testing.assert_close(ours, theirs)


def test_bad_input_is_one_sentence(model, images, tmp_path):
    policy = Policy(model)
    policy.save(tmp_path / "p.safetensors")
    with pytest.raises(InputError, match="trained for 4 tokens and more, got 3"):
        policy(images, 3)
    with pytest.raises(InputError, match="smaller than one token"):
        policy(torch.randn(1, 3, 4, 4), 9)
    with pytest.raises(InputError, match=r"is a policy for .* but this model is"):
        load_policy(tmp_path / "p.safetensors", spot.load("scenes-b"))
    with pytest.raises(InputError, match="has no learned prior yet"):
        model.place(images, prior="learned")
    with pytest.raises(InputError, match="missing"):
        model.place(images, prior=str(tmp_path / "none.safetensors"))
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match="not a policy"):
        load_policy(tmp_path / "m" / "model.safetensors", model)
    with pytest.raises(InputError, match="no look 'eye'"):
        Policy(model, "eye")
    with pytest.raises(InputError, match="share of importance"):
        Policy(model, strength=1.0)
