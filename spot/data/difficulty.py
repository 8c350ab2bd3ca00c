"""The factors by which scenes are drawn, for studies of misalignment, clutter or size."""

import re
from dataclasses import dataclass
from pathlib import Path

from spot.errors import InputError


@dataclass(frozen=True)
class Difficulty:
    """The factors of a scene. A pair (low, high) is a range for uniform draws.

    Lengths are fractions of the image side, unless described in pixels.
    """

    image_size: int = 64  # side of the image, in pixels
    radius: tuple[float, float] = (0.2, 0.28)  # size of the object: the radius of a disc with the same area
    rotation: float = 30.0  # largest rotation of objects in either direction, in degrees; 180 allows all orientations
    center_bias: float = 0.7  # of the object's place. 0: uniform in the frame; 1: bell-shaped around the middle
    # The object centre's place in its cell of the patch grid, (y, x) as a fraction of the cell: (0.5, 0.5) is a patch
    # centre, (0, 0) a patch corner. None: unconstrained.
    grid_offset: tuple[float, float] | None = None
    grid: int = 8  # side of a cell of that patch grid, in pixels
    distractors: tuple[int, int] = (0, 2)  # number of small objects behind the object, of any outline and texture
    distractor_radius: tuple[float, float] = (0.04, 0.06)  # size of a distractor, like `radius`
    contrast: float = 0.75  # darkness of the background. 0: on average as bright as the object; 1: black
    texture_contrast: float = 0.5  # range of the texture's brightness, dark to light, relative to the object's mean
    texture_period: float = 5.0  # period of stripes, dots and checks, in pixels
    noise: float = 0.04  # standard deviation of the sensor noise, relative to the full range of brightness

    def __post_init__(self) -> None:
        for name in ("radius", "distractors", "distractor_radius"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise InputError(f"{name} must be a range with 0 <= low <= high, got ({low}, {high})")
        if not 0 < self.radius[1] <= 0.5:
            raise InputError(f"an object's radius must be above 0 and at most 0.5, got {self.radius[1]}")
        if self.distractor_radius[1] > 0.5:
            raise InputError(f"a distractor's radius must be at most 0.5, got {self.distractor_radius[1]}")
        for name in ("center_bias", "contrast", "texture_contrast", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        for name, minimum in {"image_size": 8, "grid": 1, "texture_period": 1, "rotation": 0}.items():
            if not getattr(self, name) >= minimum:
                raise InputError(f"{name} must be at least {minimum}, got {getattr(self, name)}")


def needle(image_size: int = 192) -> Difficulty:
    """A small object in a large picture: 24 to 40 pixels in diameter at any image size, placed uniformly.

    It has 8 to 16 smaller distractors at 192 pixels. Their number is proportional to the image's area.
    """
    if not image_size >= 64:
        raise InputError(f"a needle's picture must be at least 64 pixels a side, got {image_size}")
    clutter = (image_size / 192) ** 2
    return Difficulty(
        image_size=image_size,
        radius=(12 / image_size, 20 / image_size),
        center_bias=0.0,
        distractors=(round(8 * clutter), round(16 * clutter)),
        distractor_radius=(3 / image_size, 7 / image_size),
    )


SCENES = re.compile(r"scenes|(needle)(?::(\d+))?")


def difficulty_of(name: str | Path) -> Difficulty | None:
    """The difficulty of the scenes with this name; None if the name is not that of scenes.

    Names are "scenes"; "needle", a small object in a picture of 192 pixels; and "needle:SIZE", such as "needle:256".
    """
    named = SCENES.fullmatch(str(name))
    if named is None or Path(name).is_dir():
        return None
    return needle(int(named[2] or 192)) if named[1] else Difficulty()
