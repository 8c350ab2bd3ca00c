import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.path import Path as Polygon

from spot.data.shapes import OUTLINES, REACH, TEXTURES

STEP = 0.008
AXIS = np.arange(-2.0, 2.0, STEP) + STEP / 2
DOWN, RIGHT = np.meshgrid(AXIS, AXIS, indexing="ij")
Y, X = 0.8 * DOWN - 0.6 * RIGHT, 0.6 * DOWN + 0.8 * RIGHT  # turned, so that no edge runs along a row of points


@pytest.mark.parametrize("name", OUTLINES)
def test_every_outline_has_the_area_of_the_unit_disc_and_its_centroid_in_the_middle_and_is_within_reach(name):
    inside = OUTLINES[name](Y, X) < 0
    assert inside.sum() * STEP**2 == pytest.approx(np.pi, rel=3e-3)
    assert Y[inside].mean() == pytest.approx(0, abs=3e-3)
    assert X[inside].mean() == pytest.approx(0, abs=3e-3)
    assert np.hypot(Y, X)[inside].max() <= REACH


@pytest.mark.parametrize("name", OUTLINES)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0, 6.28), st.floats(1e-3, 1))
def test_distance_grows_no_faster_than_one_walks(name, y, x, direction, length):
    there = y + length * np.sin(direction), x + length * np.cos(direction)
    before, after = (float(OUTLINES[name](*np.float64([[py], [px]]))[0]) for py, px in ((y, x), there))
    assert abs(after - before) <= length * 1.0001 + 1e-9


def regular(corners: int, radii: list[float], first: float) -> np.ndarray:
    """Corners (x, y) on circles of these radii in turn, y down, starting `first` degrees from +x."""
    angles = np.radians(first) + 2 * np.pi * np.arange(corners) / corners
    return np.stack([np.cos(angles), np.sin(angles)], 1) * np.resize(radii, corners)[:, None]


# Worked out from area = pi: side² = pi; sqrt(3)/4 side² = pi; a pentagram's area is 1.12257 R².
CORNERS = {
    "square": regular(4, [np.sqrt(np.pi / 2)], 45),
    "triangle": regular(3, [np.sqrt(4 * np.pi / (3 * np.sqrt(3)))], -90),
    "star": regular(10, [np.sqrt(np.pi / 1.12257), np.sqrt(np.pi / 1.12257) * 0.381966], -90),
}


@pytest.mark.parametrize("name", CORNERS)
def test_straight_outlines_are_the_polygons_of_their_corners(name):
    corners = Polygon(CORNERS[name])
    points = np.random.default_rng(0).uniform(-1.8, 1.8, (20_000, 2))
    distance = OUTLINES[name](points[:, 1], points[:, 0])
    clear = abs(distance) > 1e-3
    np.testing.assert_array_equal((distance < 0)[clear], corners.contains_points(points)[clear])


@pytest.mark.parametrize(
    "name, inside, outside",
    [
        ("disc", [(0, 0), (0, 0.99)], [(0.8, 0.8)]),
        ("ring", [(0, 0.9), (-0.9, 0)], [(0, 0), (0, 1.3)]),
        ("cross", [(0, 1.2), (1.2, 0), (0, 0)], [(0.7, 0.7)]),
        ("heart", [(1.2, 0), (-0.5, 0.7), (-0.5, -0.7)], [(-0.75, 0), (1, 0.5)]),  # point below, notch above
        ("crescent", [(0, -0.5), (1.1, 1.2), (-1.1, 1.2)], [(0, 0.6), (0, 1.2)]),  # open to the right
    ],
)
def test_curved_outlines_hold_the_points_one_expects(name, inside, outside):
    for y, x in inside:
        assert OUTLINES[name](np.array([y]), np.array([x])) < 0
    for y, x in outside:
        assert OUTLINES[name](np.array([y]), np.array([x])) > 0


@pytest.mark.parametrize("period", [4.0, 5.0, 8.0])
@pytest.mark.parametrize("name", TEXTURES)
def test_every_texture_repeats_and_averages_to_nothing(name, period):
    axis = (np.arange(400) + 0.5) * period / 400
    y, x = np.meshgrid(axis, axis, indexing="ij")
    shade = TEXTURES[name](y, x, period)
    assert shade.mean() == pytest.approx(0, abs=0.03)
    np.testing.assert_allclose(shade, TEXTURES[name](y + 3 * period, x - 2 * period, period), atol=1e-6)
    assert shade.max() <= 0.5
    assert shade.max() - shade.min() == pytest.approx(0 if name == "plain" else 1, abs=1e-6)


def test_textures_look_like_their_names():
    at = lambda name, y, x: float(TEXTURES[name](np.array([y]), np.array([x]), 8.0)[0])  # noqa: E731
    assert at("stripes", 4, 0) == at("stripes", 4, 3) > at("stripes", 0, 0)  # along x nothing changes
    assert at("dots", 4, 4) < at("dots", 0, 0)  # dark dots
    assert at("dots", 4, 0) == at("dots", 0, 4) == at("dots", 0, 0)  # round them, all is light
    assert at("checks", 4, 4) == at("checks", 0, 0) > at("checks", 4, 0) == at("checks", 0, 4)
