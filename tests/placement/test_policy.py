"""A policy predicts a map from the image and places tokens by it."""

import copy

import pytest
import torch
import torch.nn.functional as F

import spot
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.models.family import hash_weights
from spot.placement.policy import KEY, Policy, read_policy_file, upsampling
from spot.placement.priors import equal_shares, focus, isotropic
from spot.store import read_tensors, write_tensors
from tests.conftest import random_policy


@pytest.fixture(scope="module")
def model():
    return spot.load("scenes-a")


@pytest.fixture
def images():
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def new_policy(model, **options):
    return Policy(model.patch_size, about={"model": model.name, "hash": hash_weights(model)}, **options)


def test_a_policy_places_any_number_of_tokens_inside_the_image_and_ends_at_the_grid(model, images):
    policy = random_policy(model)
    for tokens in (4, 7, 25):
        positions = policy(images, tokens)
        assert positions.shape == (3, tokens, 2)
        assert (positions >= 0.5 / 64).all() and (positions <= 1 - 0.5 / 64).all()
        assert not torch.allclose(positions, isotropic(images, tokens), atol=1e-3)
    torch.testing.assert_close(policy(images, len(model.grid())), model.grid(images))
    torch.testing.assert_close(new_policy(model)(images, 16), isotropic(images, 16))  # its map is flat


def test_maps_are_densities_over_any_shape_of_image(model):
    maps = random_policy(model).maps(torch.randn(2, 3, 64, 96))
    assert maps.shape[1] == maps.shape[2]
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(2))
    assert not torch.allclose(maps[0], maps[1])


def test_tokens_go_where_the_map_is(model, images):
    maps = torch.full((3, 16, 16), 1e-6)
    maps[0, :8, :8] = maps[1, 8:, :8] = maps[2, 8:, 8:] = 1 / 64
    positions = new_policy(model, strength=0.9).place(maps, images, 16)
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
    mine = equal_shares(smooth / smooth.sum((1, 2), keepdim=True), 0.5, images, 9)
    torch.testing.assert_close(mine, focus(images, 9, maps=maps))


def test_positions_have_a_gradient_in_the_map(images):
    density = torch.rand(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    density = (density / density.sum((1, 2), keepdim=True)).requires_grad_()
    options = {"eps": 1e-3, "atol": 2e-3, "rtol": 2e-2}  # positions are float32
    assert torch.autograd.gradcheck(lambda each: equal_shares(each, 0.7, images[:2], 5).double(), density, **options)


def test_a_policy_is_a_prior_by_itself_by_name_and_by_file(model, images, tmp_path):
    own = copy.deepcopy(model)
    policy = random_policy(own, side=24, strength=0.5, min_tokens=6)
    expected = policy(images, 9)
    policy.save(tmp_path / "p.safetensors")
    own.tokens = 9
    own.prior = policy
    torch.testing.assert_close(own.place(images), expected)
    assert not own.random
    assert own.prior == "learned" and own.policy is policy and "prior" not in dict(own.named_children())
    own.prior, own.policy = "isotropic", None
    torch.testing.assert_close(own.place(images, keys=["a", "b", "c"], prior=policy), expected)
    own.policy = spot.load_policy(tmp_path / "p.safetensors", own)
    assert own.policy.describe() == policy.describe()
    torch.testing.assert_close(own.place(images, prior="learned"), expected)
    own.save_pretrained(tmp_path / "model")
    for prior in ("learned", tmp_path / "p.safetensors"):  # saved with the model, and by itself
        loaded = spot.load(tmp_path / "model", prior=prior, tokens=9)
        torch.testing.assert_close(loaded.place(images), expected)


class Corner(torch.nn.Module):
    """A prior of one's own with weights: all tokens at one learned place."""

    def __init__(self):
        super().__init__()
        self.place = torch.nn.Parameter(torch.tensor([0.25, 0.75]))

    def forward(self, images, tokens, generator=None):
        return self.place.expand(len(images), tokens, 2)


def test_a_prior_that_is_a_module_becomes_a_part_of_the_model_and_learns_with_it(model, images):
    own = copy.deepcopy(model)
    own.prior = Corner()
    own(images, tokens=5).sum().backward()
    assert own.policy.place.grad.abs().sum() > 0 and "policy.place" in own.state_dict()
    with pytest.raises(InputError, match="only a Policy can be saved, got Corner"):
        own.save_pretrained("nowhere")


def test_the_cost_of_looking_is_counted(model, images):
    plain, looking = (macs(model.at(tokens=9, prior=prior)) for prior in ("isotropic", new_policy(model, side=32)))
    # By hand, width 32: two strided convolutions, one to 4 × 4, three blocks of 64 and one of 32 channels, head.
    first = 16 * 16 * 27 * 16 + 8 * 8 * (16 * 9) * 32 + 4 * 4 * (32 * 9) * 64
    blocks = 3 * 16 * (64 * 25 + 2 * 64 * 128) + 64 * (32 * 25 + 2 * 32 * 64)
    finer = 32 * 8 * 8 + 32 * 8 * 32  # a map of 8 × 8 interpolated to 32 × 32, an axis at a time
    assert looking - plain == first + blocks + 16 * 64 * 32 + 64 * 32 + finer


def test_interpolation_is_that_of_torch():
    maps = torch.rand(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = upsampling(3) @ maps @ upsampling(5).mT
    theirs = F.interpolate(maps[:, None], scale_factor=4.0, mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(ours, theirs)


def test_bad_input_is_one_sentence(model, images, tmp_path):
    policy = new_policy(model)
    policy.save(tmp_path / "p.safetensors")
    with pytest.raises(InputError, match="trained for 4 tokens and more, got 3"):
        policy(images, 3)
    with pytest.raises(InputError, match="smaller than one token"):
        policy(torch.randn(1, 3, 4, 4), 9)
    with pytest.raises(InputError, match=r"is a policy for .* but this model is"):
        spot.load_policy(tmp_path / "p.safetensors", spot.load("scenes-b"))
    with pytest.raises(InputError, match=r"has no learned prior; train one .* or load it with its policy's file"):
        model.place(images, prior="learned")
    with pytest.raises(InputError, match="missing"):
        spot.load("scenes-a", prior=str(tmp_path / "none.safetensors"))
    with pytest.raises(InputError, match="is the file of a policy; load it"):
        model.place(images, prior=str(tmp_path / "p.safetensors"))
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match="not a policy"):
        spot.load_policy(tmp_path / "m" / "model.safetensors", model)
    with pytest.raises(InputError, match="share of importance"):
        Policy(8, strength=1.0)
    state, about = read_tensors(tmp_path / "p.safetensors", KEY, "a policy")
    for change in ({"look": "tokens"}, {"sizes": 0.5}):
        write_tensors(tmp_path / "old.safetensors", state, KEY, {**about, **change})
        with pytest.raises(InputError, match=r"its kind of policy was removed in version 0.3; train it again"):
            spot.load_policy(tmp_path / "old.safetensors", model)


def test_policies_of_0_2_have_no_patch_size_and_take_the_models(tmp_path):
    policy = Policy(8)
    about = {"format": 1, **policy.describe()}
    del about["patch_size"]
    write_tensors(tmp_path / "old.safetensors", policy.look.state_dict(), KEY, about)
    read = read_policy_file(tmp_path / "old.safetensors", 8)
    assert read.patch_size == 8 and not any(parameter.requires_grad for parameter in read.parameters())
