"""Spatial priors: exactly N tokens, inside the image, where the paper wants them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.quasirandom import SobolEngine

from spot.draws import generator_for
from spot.errors import InputError
from spot.placement.priors import (
    BOUNDARY_DEPTH,
    GAUSSIAN_WIDTH,
    PRIORS,
    center,
    focus,
    gaussian,
    isotropic,
    resolve_prior,
    salient,
    sobol,
    uniform,
)

SQUARE = torch.zeros(2, 3, 224, 224)
FIRST_ONLY = torch.stack([torch.ones(224, 224), torch.zeros(224, 224)])  # maps: the second image has none
ELASTIC_BUDGETS = [39, 59, 78, 98, 118, 137, 157, 176, 196]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def maps_of(images, name):
    """A ramp, for priors that need a map."""
    height, width = images.shape[-2:]
    ramp = torch.linspace(0.1, 0.9, height * width).view(height, width).expand(len(images), -1, -1)
    return ramp if PRIORS[name].needs_map else None


@pytest.mark.parametrize("name", PRIORS)
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 260), height=st.integers(1, 400), width=st.integers(1, 400))
def test_every_prior_places_each_token_inside_the_image(name, tokens, height, width):
    images = torch.zeros(2, 1, 1, 1).expand(2, 1, height, width)
    positions = PRIORS[name](images, tokens, seeded(), maps=maps_of(images, name))
    assert positions.shape == (2, tokens, 2) and positions.dtype == torch.float32
    pixels = positions.double() * torch.tensor([height, width]) - 0.5  # in pixel-centre coordinates
    assert pixels.min() > -1e-3
    assert (pixels.amax((0, 1)) < torch.tensor([height, width]) - 1 + 1e-3).all()


@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_knows_whether_images_and_seeds_make_a_difference(name):
    before = torch.get_rng_state()
    first, again, second = (PRIORS[name](SQUARE, 25, seeded(seed), maps=maps_of(SQUARE, name)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and torch.equal(before, torch.get_rng_state())
    assert torch.equal(first[0], first[1]) != PRIORS[name].random  # the images are the same
    assert torch.equal(first, second) != PRIORS[name].random


@pytest.mark.parametrize("name", PRIORS)
def test_with_keys_an_image_has_its_own_tokens_in_every_batch(name):
    images, keys = torch.rand(4, 3, 40, 30), ["a", "b", "c", "d"]
    maps = torch.rand(4, 40, 30) if PRIORS[name].needs_map else None
    together = PRIORS[name](images, 9, keys=keys, seed=3, maps=maps)
    for row in (2, 0):
        own = None if maps is None else maps[row : row + 1]
        alone = PRIORS[name](images[row : row + 1], 9, generator_for(3, keys[row]), maps=own)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=0)
    assert torch.equal(together, PRIORS[name](images, 9, keys=keys, seed=4, maps=maps)) != PRIORS[name].random


def test_a_function_is_a_prior_and_one_of_two_arguments_gets_a_sentence():
    def corner(images, tokens, generator):
        return torch.zeros(len(images), tokens, 2)

    assert resolve_prior(corner).name == "corner"
    assert resolve_prior(corner)(SQUARE, 3).shape == (2, 3, 2)
    with pytest.raises(InputError, match=r"function of \(images, tokens, generator\), but <lambda> is not"):
        resolve_prior(lambda images, tokens: None)
    with pytest.raises(InputError, match=r"must give positions \(2, 4, 2\), got \(2, 3, 2\)"):
        resolve_prior(lambda images, tokens, generator: torch.zeros(2, 3, 2))(SQUARE, 4)


def test_isotropic_with_196_tokens_is_the_vit_b16_grid_and_follows_the_aspect_of_the_image():
    first, second, *_, last = isotropic(SQUARE, 196)[0] * 224
    torch.testing.assert_close(first, torch.tensor([8.0, 8.0]))
    torch.testing.assert_close(second, torch.tensor([8.0, 24.0]))  # next column, same row
    torch.testing.assert_close(last, torch.tensor([216.0, 216.0]))
    wide = isotropic(torch.zeros(1, 3, 100, 400), 16)[0]
    assert len(wide[:, 0].unique()) == 2  # two rows of eight, cells 50 × 50


@pytest.mark.parametrize("prior", [isotropic, center])
@pytest.mark.parametrize("rows, columns", [(14, 14), (9, 21), (30, 4), (1, 7)])
def test_a_full_grid_of_tokens_is_that_grid(prior, rows, columns):
    images = torch.zeros(1, 3, rows * 16, columns * 16)
    options = {"cells": rows * columns} if prior is center else {}
    expected = [((r + 0.5) / rows, (c + 0.5) / columns) for r in range(rows) for c in range(columns)]
    torch.testing.assert_close(prior(images, rows * columns, **options)[0], torch.tensor(expected))


@pytest.mark.parametrize("tokens", [25, 49, 100, *ELASTIC_BUDGETS])
def test_isotropic_covers_the_image_evenly(tokens):
    """No point is farther from a token than the diagonal of a slightly stretched square cell."""
    positions = isotropic(SQUARE, tokens)[0]
    points = torch.cartesian_prod(torch.linspace(0, 1, 60), torch.linspace(0, 1, 60))
    farthest = torch.cdist(points, positions).amin(1).max()
    assert farthest < 1.35 * math.sqrt(2) / 2 / math.sqrt(tokens)
    nearest_neighbour = (torch.cdist(positions, positions) + torch.eye(tokens)).amin(1)
    assert nearest_neighbour.min() > 0.5 / math.sqrt(tokens)
    torch.testing.assert_close(positions.mean(0), torch.tensor([0.5, 0.5]), atol=0.02, rtol=0)


def test_center_draws_tokens_to_the_middle_and_keeps_their_order():
    even, drawn = isotropic(SQUARE, 25)[0] - 0.5, center(SQUARE, 25)[0] - 0.5
    assert (drawn.abs() <= even.abs() + 1e-6).all()
    assert drawn.abs().mean() < 0.9 * even.abs().mean()
    rows = drawn[::5, 0]
    assert (rows.diff() > 0).all()
    # By hand: d = 0.2, b = 1 - 25/196, width 0.3.
    expected = 0.2 * (1 - (1 - 25 / 196) * math.exp(-((0.2 / 0.3) ** 2)))
    assert float(rows[3]) == pytest.approx(expected, abs=1e-6)


def test_uniform_is_uniform():
    positions = uniform(torch.zeros(50, 3, 64, 64), 400, seeded()).flatten(0, 1)
    counts = torch.histogramdd(positions, [4, 4], range=[0.0, 1.0, 0.0, 1.0]).hist
    assert (counts - 1250).abs().max() < 5 * math.sqrt(1250)


def test_gaussian_has_the_stated_width_and_no_pile_at_the_edges():
    positions = gaussian(torch.zeros(200, 3, 224, 224), 200, seeded()).double()
    x = torch.linspace(-0.5, 0.5, 20001, dtype=torch.float64)
    density = torch.exp(-0.5 * (x / GAUSSIAN_WIDTH) ** 2)
    expected = math.sqrt(float((x**2 * density).sum() / density.sum()))
    assert float((positions - 0.5).square().mean().sqrt()) == pytest.approx(expected, rel=0.01)
    at_edge = (positions < 1 / 224).double().mean()
    assert at_edge < 0.01


def test_sobol_is_progressive():
    assert torch.equal(sobol(SQUARE, 64, seeded())[:, :25], sobol(SQUARE, 25, seeded()))


@pytest.mark.parametrize("tokens, cells", [(16, 4), (64, 8), (256, 16)])
def test_sobol_puts_one_point_in_each_cell_of_a_power_of_two(tokens, cells):
    """A scrambled Sobol sequence in two dimensions is a (0, m, 2)-net, as torch's own engine confirms."""
    for points in (sobol(SQUARE, tokens, seeded())[0], SobolEngine(2, scramble=True, seed=0).draw(tokens)):
        cell = (points * cells).floor() @ torch.tensor([float(cells), 1.0])
        assert len(cell.unique()) == tokens


def test_boundary_stays_on_the_frame_and_visits_all_four_sides():
    positions = PRIORS["boundary"](torch.zeros(4, 3, 224, 224), 200, seeded()).flatten(0, 1)
    to_edge = torch.minimum(positions, 1 - positions)
    assert to_edge.amin(1).max() <= BOUNDARY_DEPTH + 1e-6
    side = torch.cat([positions, 1 - positions], 1).argmin(1)
    assert (torch.bincount(side, minlength=4) > 120).all()


def test_salient_follows_the_density_of_the_map_within_its_pixels():
    maps = torch.zeros(1, 4, 6)
    maps[0, 1, 2], maps[0, 3, 5] = 0.75, 0.25
    positions = salient(torch.zeros(1, 3, 4, 6), 4000, seeded(), maps=maps)[0].double()
    pixel = (positions * torch.tensor([4, 6])).floor()
    first = (pixel == torch.tensor([1, 2])).all(1)
    second = (pixel == torch.tensor([3, 5])).all(1)
    assert bool((first | second).all())
    assert float(first.double().mean()) == pytest.approx(0.75, abs=0.03)
    within = (positions * torch.tensor([4, 6]))[first] - torch.tensor([1, 2])
    assert within.min() < 0.05 and within.max() > 0.95  # anywhere in the pixel, not its centre


def test_focus_gives_each_token_an_equal_share(monkeypatch):
    # By hand: the left half has 3/4 of the saliency, so half of that and half of the area are 5/8 of all. Of four
    # columns of tokens at 1/8, 3/8, 5/8 and 7/8 of it, three lie in the left half, the third on its border.
    monkeypatch.setattr("spot.placement.priors.FOCUS_BLUR", 0.0)
    maps = torch.ones(1, 64, 64)
    maps[0, :, :32] = 3.0
    positions = focus(torch.zeros(1, 3, 64, 64), 16, None, maps=maps / 3)[0].unflatten(0, (4, 4))
    columns = torch.tensor([1 / 8, 3 / 8, 5 / 8]) / (5 / 8) / 2
    columns = torch.cat([columns, torch.tensor([1 / 2 + (7 / 8 - 5 / 8) / (3 / 8) / 2])])
    torch.testing.assert_close(positions[..., 1], columns.expand(4, 4))
    torch.testing.assert_close(positions[..., 0], ((torch.arange(4) + 0.5) / 4)[:, None].expand(4, 4))
    images = torch.zeros(2, 3, 48, 80)  # a constant map changes nothing
    torch.testing.assert_close(focus(images, 39, None, maps=torch.full((2, 48, 80), 0.3)), isotropic(images, 39))


@pytest.mark.parametrize("tokens", [0, -3, 2.5, True])
def test_a_budget_must_be_a_whole_number_of_at_least_one(tokens):
    with pytest.raises(InputError, match="at least 1"):
        PRIORS["uniform"](SQUARE, tokens, seeded())


@pytest.mark.parametrize(
    "place, message",
    [
        (lambda: resolve_prior("isotrpic"), "did you mean 'isotropic'"),
        (lambda: PRIORS["salient"](SQUARE, 4, seeded()), "salient prior needs saliency maps"),
        (lambda: PRIORS["uniform"](SQUARE[:1], 4, keys=["a", "b"]), "2 keys for 1 images"),
        (lambda: PRIORS["salient"](SQUARE, 4, seeded(), maps=torch.ones(2, 5, 5)), "images' size"),
        (lambda: salient(SQUARE, 4, seeded(), maps=FIRST_ONLY), "image 1 leaves no pixel"),
        (lambda: focus(SQUARE, 4, seeded(), maps=FIRST_ONLY), "image 1 leaves no pixel"),
        (lambda: PRIORS["background"](SQUARE, 4, seeded(), maps=torch.ones(2, 224, 224)), "leaves no pixel"),
    ],
)
def test_bad_input_is_named(place, message):
    with pytest.raises(InputError, match=message):
        place()


def test_the_authors_center_does_not_fade():
    """With a full grid, 0.2 wide: the token at (8 + 16·6) / 224 = 0.4643 is 0.0357 from the middle."""
    full = PRIORS["center-authors"](SQUARE, 196)[0]
    offset = (8 + 16 * 6) / 224 - 0.5
    expected = 0.5 + offset * (1 - math.exp(-((offset / 0.2) ** 2)))
    torch.testing.assert_close(full[6 * 14 + 6], torch.tensor([expected, expected]))


def test_the_authors_boundary_is_on_the_edges_and_mostly_in_corners():
    """|u|¹⁰ < 0.02 for |u| < 0.676: so often is a coordinate within a hundredth of an edge."""
    positions = PRIORS["boundary-authors"](torch.zeros(4, 3, 224, 224), 2000, seeded()).flatten(0, 1)
    edge = (positions - 0.5).abs() > 0.4899
    assert edge.float().mean().item() == pytest.approx(0.02**0.1, abs=0.02)
    assert edge.all(1).float().mean().item() == pytest.approx(0.02**0.2, abs=0.03)
    assert positions.min() >= 0.01 and positions.max() <= 0.99


def test_salient_without_replacement_has_no_two_tokens_in_a_cell_and_takes_bright_cells_first():
    maps = torch.full((2, 64, 64), 1e-6)
    maps[:, 16:32, 32:64] = 1.0  # 8 of the 64 cells of 8 × 8 pixels have nearly all of the saliency
    positions = PRIORS["salient-distinct"](torch.zeros(2, 3, 64, 64), 12, seeded(), maps=maps, cells=64)
    for image in ((positions * 8).floor() @ torch.tensor([8.0, 1.0])).tolist():
        assert len(set(image)) == 12
        bright = {row * 8 + column for row in (2, 3) for column in (4, 5, 6, 7)}
        assert set(image[:8]) == bright  # 12 tokens want more cells than there are bright ones


@pytest.mark.parametrize(
    "name, left, share",  # with 0.8 in the right half, tokens there
    [("salient", 0.2, 0.8), ("salient-distinct", 0.2, 0.8), ("salient-soft", 0.05, 2 / 3), ("background", 0.4, 0.25)],
)
def test_priors_draw_in_proportion_to_the_map_to_its_fourth_root_or_to_the_rest(name, left, share):
    maps = torch.full((2000, 32, 32), left)
    maps[:, :, 16:] = 0.8
    drawn = PRIORS[name](torch.zeros(2000, 3, 32, 32), 1, seeded(), maps=maps, cells=16)[..., 1]
    assert (drawn > 0.5).float().mean().item() == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_positions_of_a_users_function_must_be_finite(value):
    def nowhere(images, tokens, generator=None):
        return torch.full((len(images), tokens, 2), value)

    with pytest.raises(InputError, match="positions must be finite"):
        resolve_prior(nowhere)(torch.zeros(2, 3, 8, 8), 4)
