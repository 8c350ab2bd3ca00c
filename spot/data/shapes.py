"""The outlines and surface textures of scenes, as functions of the plane.

An outline maps y (down) and x (right), in units of the object's radius, to the signed distance
from its edge, negative inside. Each has the area of the unit disc and its centroid at the origin, so
the class cannot be predicted from an object's brightness or place. A texture maps y and x, in pixels,
and its period to a shade with maximum 0.5 and mean 0. To add one, write the function and list it in
OUTLINES or TEXTURES.

Only additions, products, quotients, roots and comparisons are used: bitwise equal on every machine.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # float32 throughout


def disc(y: Array, x: Array) -> Array:
    return np.sqrt(y * y + x * x) - 1


def ring(y: Array, x: Array) -> Array:
    return np.abs(np.sqrt(y * y + x * x) - 0.92796) - 0.26941  # radii 1.19737 and 0.65855


def square(y: Array, x: Array) -> Array:
    return np.maximum(np.abs(y), np.abs(x)) - 0.88623


def triangle(y: Array, x: Array) -> Array:
    return np.maximum(y, 0.86603 * np.abs(x) - 0.5 * y) - 0.77756


def cross(y: Array, x: Array) -> Array:
    y, x = np.abs(y), np.abs(x)
    return np.maximum(np.maximum(y, x) - 1.24096, np.minimum(y, x) - 0.37229)


def star(y: Array, x: Array) -> Array:
    # Five lines form a pentagram. A point inside is on the inner side of at least four lines.
    most = second = np.full_like(y, -np.inf)
    for normal_y, normal_x in STAR_NORMALS:
        line = normal_y * y + normal_x * x
        second = np.maximum(second, np.minimum(most, line))
        most = np.maximum(most, line)
    return second - 0.51696


STAR_NORMALS = ((-1.0, 0.0), (-0.30902, 0.95106), (-0.30902, -0.95106), (0.80902, 0.58779), (0.80902, -0.58779))


def heart(y: Array, x: Array) -> Array:
    # A square standing on a corner, with a disc on each of its two upper sides.
    y, x = y - 0.29403, np.abs(x)
    corner = 0.70711 * (np.abs(y) + x)
    lobe_y, lobe_x = y + 0.46903, x - 0.46903
    return np.minimum(corner, np.sqrt(lobe_y * lobe_y + lobe_x * lobe_x)) - 0.66331


def crescent(y: Array, x: Array) -> Array:
    outer, inner = x - 0.50191, x - 1.13352
    return np.maximum(np.sqrt(y * y + outer * outer) - 1.40359, 1.05269 - np.sqrt(y * y + inner * inner))


OUTLINES: dict[str, Callable[[Array, Array], Array]] = {
    outline.__name__: outline for outline in (disc, ring, square, triangle, cross, star, heart, crescent)
}
REACH = 1.8  # upper bound of every outline's extent from its centre, in units of its radius


def edge(position: Array, period: float) -> Array:
    """Signed distance in pixels to the nearest edge of a square wave, positive on the light half."""
    phase = position / period
    return period * (0.25 - np.abs(phase - np.floor(phase) - 0.5))


def sharp(distance: Array) -> Array:
    """Convert a signed distance in pixels to coverage in [0, 1], anti-aliased over one pixel."""
    return np.clip(distance + 0.5, 0, 1)


def no_texture(y: Array, x: Array, period: float) -> Array:
    return np.zeros_like(y)


def stripes(y: Array, x: Array, period: float) -> Array:
    return sharp(edge(y, period)) - 0.5


def dots(y: Array, x: Array, period: float) -> Array:
    y, x = y / period, x / period
    y, x = y - np.floor(y) - 0.5, x - np.floor(x) - 0.5
    return DOT * DOT * 3.14159 - sharp(period * (DOT - np.sqrt(y * y + x * x)))


def checks(y: Array, x: Array, period: float) -> Array:
    return 2 * (sharp(edge(y, period)) - 0.5) * (sharp(edge(x, period)) - 0.5)


DOT = 0.33  # radius of a dot, in periods
TEXTURES: dict[str, Callable[[Array, Array, float], Array]] = {
    "plain": no_texture, "stripes": stripes, "dots": dots, "checks": checks,
}  # fmt: skip
