"""Scenes: the built-in data set, drawn on demand and never stored.

A scene is an RGB image of one object in front of a darker 1/f background, among smaller distractors.
Its class is the object's outline and surface texture, 8 × 4 = 32 classes. Its place (not aligned to a
grid), size, rotation, colour and brightness are independent of the class. Each factor is a field of
`Difficulty` with its own random numbers, so changing one factor leaves the others unchanged: without
distractors, scene 17 shows the same object on the same background.

    scenes = Scenes("test")
    image, label, key = scenes[17]               # (3, H, W) float32 in [0, 1]; 17 % 32; "test/00000017"
    batch = scenes.draw(range(128))              # much faster than one by one
    batch.images, batch.labels, batch.masks, batch.centers

Images are RGB in [0, 1]. Normalise them with a model's `data_config` (mean, std), like photographs.

Images have the same bytes on every machine. Random numbers use integer arithmetic (counter_random.py).
Pixels use elementwise additions, products, quotients, roots and comparisons, for which IEEE 754 defines
the rounding. Library sums (whose order varies) and library sines, powers and exponentials (whose last
digits vary) are avoided.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from spot.data.counter_random import Words, keys, normals, uniforms
from spot.data.difficulty import Difficulty
from spot.data.shapes import OUTLINES, REACH, TEXTURES, Array, sharp
from spot.errors import InputError, unknown

Draws = NDArray[np.float64]

CLASSES: tuple[str, ...] = tuple(f"{texture} {outline}" for outline in OUTLINES for texture in TEXTURES)
SPLITS = {"train": 1_000_000, "validation": 4_096, "test": 8_192}  # default number of scenes
DEFAULT = Difficulty()


class SceneBatch(NamedTuple):
    """B scenes: images, labels and keys as for photographs, and ground-truth masks and centers.

    images (B, 3, H, W) in [0, 1]; labels (B,); B keys; masks (B, H, W), the object's coverage of
    each pixel, in [0, 1]; centers (B, 2), the object's centroid (y, x) as a fraction of height and
    width.
    """

    images: Tensor
    labels: Tensor
    keys: list[str]
    masks: Tensor
    centers: Tensor


CHUNK = 32  # number of scenes per step, which fit into the processor's cache


def draw_scenes(indices: Sequence[int], seed: int = 0, difficulty: Difficulty = DEFAULT) -> SceneBatch:
    """The scenes with these indices (B,). A scene does not depend on the others in the batch."""
    numbers = np.asarray(indices, np.int64)
    parts = [draw_chunk(numbers[at : at + CHUNK], seed, difficulty) for at in range(0, max(1, len(numbers)), CHUNK)]
    images, masks, centers = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    labels = torch.from_numpy(numbers % len(CLASSES))
    return SceneBatch(images.float().div_(255), labels, [f"{n:08d}" for n in numbers], masks, centers)


def draw_chunk(indices: NDArray[np.int64], seed: int, difficulty: Difficulty) -> tuple[NDArray[np.uint8], Array, Array]:
    """Images (B, 3, H, W) as bytes, masks (B, H, W) and centers (B, 2)."""
    key, size = keys(seed, indices), difficulty.image_size
    canvas = draw_background(key, difficulty)

    low, high = difficulty.distractors
    number = low + np.floor(uniforms(key, Stream.NUMBER, 1)[:, 0] * (high + 1 - low))
    for place in range(high):
        chosen = np.flatnonzero(place < number)
        if len(chosen):
            paint(canvas, chosen, distractor(key[chosen], place, difficulty), difficulty)
    thing = main_object(indices % len(CLASSES), key, difficulty)
    mask = paint(canvas, np.arange(len(key)), thing, difficulty)

    noise = normals(key, Stream.NOISE, 3 * size * size).reshape(len(key), 3, size, size)
    light = canvas + np.float32(difficulty.noise) * noise
    image = np.floor(np.clip(light, 0, 1) * 255 + np.float32(0.5)).astype(np.uint8)
    return image, mask, (thing.center / size).astype(np.float32)


class Stream(IntEnum):
    """Streams of random numbers. A factor keeps its numbers when another factor changes."""

    OBJECT, HUES, CLOUDS, NOISE, NUMBER, DISTRACTORS = range(6)  # plus one stream for each further distractor


class Things(NamedTuple):
    """M things to draw, one per image; lengths in pixels."""

    outline: NDArray[np.int64]  # (M,), index in OUTLINES
    texture: NDArray[np.int64]  # (M,), index in TEXTURES
    center: Draws  # (M, 2), (y, x)
    radius: Draws  # (M,)
    largest: float  # largest possible radius
    turn: Draws  # (M,), degrees
    phase: Draws  # (M, 2), shift of the texture, in periods
    color: Draws  # (M, 3), mean RGB


def main_object(labels: NDArray[np.int64], key: Words, difficulty: Difficulty) -> Things:
    draws, size = uniforms(key, Stream.OBJECT, 12), difficulty.image_size
    radius = between(*difficulty.radius, draws[:, 0])
    anywhere, second, third = (2 * draws[:, at : at + 2] - 1 for at in (1, 3, 5))  # (y, x) in [-1, 1]
    middle = (anywhere + second + third) / 3
    center = size * (0.5 + (0.5 - radius[:, None]) * between(anywhere, middle, difficulty.center_bias))
    if difficulty.grid_offset is not None:
        center = (np.floor(center / difficulty.grid) + np.array(difficulty.grid_offset)) * difficulty.grid
    return Things(
        outline=labels // len(TEXTURES),
        texture=labels % len(TEXTURES),
        center=center,
        radius=size * radius,
        largest=size * difficulty.radius[1],
        **appearance(draws[:, 7:], difficulty),
    )


def distractor(key: Words, place: int, difficulty: Difficulty) -> Things:
    draws, size = uniforms(key, Stream.DISTRACTORS + place, 10), difficulty.image_size
    return Things(
        outline=np.floor(len(OUTLINES) * draws[:, 0]).astype(np.int64),
        texture=np.floor(len(TEXTURES) * draws[:, 1]).astype(np.int64),
        center=size * draws[:, 2:4],
        radius=size * between(*difficulty.distractor_radius, draws[:, 4]),
        largest=size * difficulty.distractor_radius[1],
        **appearance(draws[:, 5:], difficulty),
    )


BRIGHTNESS = 0.68  # mean brightness of an object's strongest channel


def appearance(draws: Draws, difficulty: Difficulty) -> dict[str, Draws]:
    """Turn, phase and colour of M things, from draws (M, 5)."""
    color = BRIGHTNESS * tint(draws[:, 3]) * between(0.9, 1.1, draws[:, 4, None])
    return {"turn": (2 * draws[:, 0] - 1) * difficulty.rotation, "phase": draws[:, 1:3], "color": color}


def draw_background(key: Words, difficulty: Difficulty) -> Array:
    """Dark 1/f clouds in two hues, (B, 3, H, W)."""
    size = difficulty.image_size
    hues = uniforms(key, Stream.HUES, 2)
    first, second = (tint(hues[:, i]).astype(np.float32)[:, :, None, None] for i in (0, 1))
    sides = [4 << octave for octave in range(max(1, (size - 1).bit_length() - 2))]  # 4, 8, 16, ... below size
    noise = normals(key, Stream.CLOUDS, 8 * 8 + sum(side * side for side in sides))
    blend = np.clip(0.5 + 0.5 * clouds(noise[:, :64], [8], size), 0, 1)[:, None]
    level = np.clip(1 + 0.3 * clouds(noise[:, 64:], sides, size), 0, 2)[:, None]
    return np.float32(BRIGHTNESS * (1 - difficulty.contrast)) * level * (first + blend * (second - first))


def clouds(noise: Array, sides: Sequence[int], size: int) -> Array:
    """Octaves of noise on successively finer grids, (B, size, size).

    The octaves have equal variance. In the plane, power therefore falls as 1/f² and amplitude as 1/f.
    """
    field = np.zeros((len(noise), sides[0], sides[0]), np.float32)
    for side in sides:
        octave, noise = noise[:, : side * side], noise[:, side * side :]
        field = doubled(field + octave.reshape(len(field), side, side))
    while field.shape[1] < size:
        field = doubled(field)
    return field[:, :size, :size]


def paint(canvas: Array, chosen: NDArray[np.int64], things: Things, difficulty: Difficulty) -> Array:
    """Draw M things into the chosen images of the canvas (B, 3, H, W).

    Returns their coverage of each pixel, (M, H, W), in [0, 1].
    """
    size = difficulty.image_size
    side = min(2 * int(np.ceil(REACH * things.largest + 3)) + 1, size)  # 3: the blur of an acute tip
    # The first pixel of a square that contains the visible part of the thing.
    corner = np.clip(np.floor(things.center).astype(np.int64) - side // 2, 0, size - side)
    offsets = corner[:, :, None] + np.arange(side) + 0.5 - things.center[:, :, None]  # (M, 2, side), from the centre
    down, right = offsets[:, 0, :, None], offsets[:, 1, None, :]
    cos, sin = cosine(things.turn)[:, None, None], sine(things.turn)[:, None, None]
    y = (cos * down).astype(np.float32) - (sin * right).astype(np.float32)  # (M, side, side), along the thing's axes
    x = (sin * down).astype(np.float32) + (cos * right).astype(np.float32)

    alpha, shade = np.empty_like(y), np.empty_like(y)
    radius = things.radius.astype(np.float32)[:, None, None]
    for number, outline in enumerate(OUTLINES.values()):
        rows = np.flatnonzero(things.outline == number)
        if len(rows):
            alpha[rows] = sharp(-radius[rows] * outline(y[rows] / radius[rows], x[rows] / radius[rows]))
    shift = (things.phase * difficulty.texture_period).astype(np.float32)[:, :, None, None]
    for number, texture in enumerate(TEXTURES.values()):
        rows = np.flatnonzero(things.texture == number)
        if len(rows):
            shade[rows] = texture(y[rows] + shift[rows, 0], x[rows] + shift[rows, 1], difficulty.texture_period)
    light = 1 + np.float32(difficulty.texture_contrast) * shade
    color = things.color.astype(np.float32)[:, :, None, None]

    cover = np.zeros((len(chosen), size, size), np.float32)
    for thing, image in enumerate(chosen):
        top, left = corner[thing]
        square = (..., slice(top, top + side), slice(left, left + side))
        cover[thing][square] = alpha[thing]
        under = canvas[image][square]
        under += alpha[thing] * (color[thing] * light[thing] - under)
    return cover


def between(low: Any, high: Any, part: Any) -> Draws:
    return low + (high - low) * part


def tint(hue: Draws) -> Draws:
    """RGB (M, 3) of half-saturated hues in [0, 1), from red over green and blue to red. The brightest channel is 1."""
    turns = hue[:, None] + np.array([0.0, 2 / 3, 1 / 3])
    distance = np.abs(6 * (turns - np.floor(turns)) - 3)  # 3 at the channel's hue, 0 at the opposite hue
    return 0.5 + 0.5 * np.clip(distance - 1, 0, 1)


def sine(degrees: Draws) -> Draws:
    """A sine by its Taylor series, bitwise equal on every machine, unlike library sines."""
    turns = degrees / 360
    angle = (turns - np.floor(turns + 0.5)) * 6.283185307179586
    square, total = angle * angle, np.ones_like(angle)
    for n in range(25, 1, -2):
        total = 1 - square * total / (n * (n - 1))
    return angle * total


def cosine(degrees: Draws) -> Draws:
    return sine(degrees + 90)


def doubled(field: Array) -> Array:
    """Bilinear upsampling from (B, S, S) to (B, 2S, 2S), with repeated borders."""
    for axis in (1, 2):
        field = field.swapaxes(1, axis)
        before = np.concatenate([field[:, :1], field[:, :-1]], 1)
        after = np.concatenate([field[:, 1:], field[:, -1:]], 1)
        pairs = np.stack([0.75 * field + 0.25 * before, 0.75 * field + 0.25 * after], 2)
        field = pairs.reshape(len(field), 2 * field.shape[1], field.shape[2]).swapaxes(1, axis)
    return field


class Scenes(Dataset[tuple[Tensor, int, str]]):
    """A split of the data set. Items are (image (3, H, W), label, key), like photographs on disk.

    Splits have different seeds, so they never share a scene. Labels are cyclic: any 32 consecutive
    indices contain each class once. A `torch.utils.data.DataLoader` fetches whole batches through
    `__getitems__`. `draw` also returns masks and centers.

    transform: applied to a batch of images (B, 3, H, W) in [0, 1]; for a model's input, use
        `torchvision.transforms.Normalize(mean, std)` with its `data_config`.
    """

    def __init__(
        self,
        split: str = "train",
        length: int | None = None,
        *,
        difficulty: Difficulty = DEFAULT,
        seed: int = 0,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if split not in SPLITS:
            raise unknown("split of the scenes", split, SPLITS)
        self.length = SPLITS[split] if length is None else length
        if self.length < 1:
            raise InputError(f"a data set needs at least one scene, got {length}")
        self.split, self.difficulty, self.transform = split, difficulty, transform
        self.seed = seed * len(SPLITS) + list(SPLITS).index(split)
        self.classes = CLASSES

    def __len__(self) -> int:
        return self.length

    @property
    def keys(self) -> list[str]:
        """The keys of all scenes, without drawing them."""
        return [f"{self.split}/{index:08d}" for index in range(self.length)]

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int, str]]:
        batch = self.draw(indices)
        return list(zip(batch.images, batch.labels.tolist(), batch.keys, strict=True))

    def draw(self, indices: Sequence[int]) -> SceneBatch:
        """The scenes with these indices, with masks and centers."""
        outside = [index for index in indices if not 0 <= index < self.length]
        if outside:
            raise IndexError(f"the {self.split} scenes are 0 to {self.length - 1}, got {outside[0]}")
        batch = draw_scenes(indices, self.seed, self.difficulty)
        images = batch.images if self.transform is None else self.transform(batch.images)
        return batch._replace(images=images, keys=[f"{self.split}/{key}" for key in batch.keys])
