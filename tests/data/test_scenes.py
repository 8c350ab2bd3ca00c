import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchvision.transforms import Normalize

from spot.data.difficulty import Difficulty, difficulty_of, needle
from spot.data.scenes import SPLITS, Scenes, cosine, draw_scenes, sine
from spot.errors import InputError

CLEAN = Difficulty(noise=0, distractors=(0, 0))
SMALL = Difficulty(noise=0, distractors=(0, 0), image_size=16)  # positions are the same at any size


# ------------------------------------------------------------------------- the same everywhere


@pytest.mark.parametrize(
    "difficulty, count, expected",
    [
        # Whoever changes these lines changes the data sets: shipped weights and results no longer belong to them.
        (Difficulty(), 64, "b8b5272d02d4ff37f15955149514075e264a9191171a644bbe347ddae037c2a4"),
        (needle(), 8, "6d776dff1add216122b24e8288de4d852a73b953533d425eb98f00d6c834e59f"),
    ],
)
def test_the_scenes_of_this_release_are_these_bytes(difficulty, count, expected):
    images = draw_scenes(range(count), seed=2, difficulty=difficulty).images.mul(255).round().byte().numpy()
    assert hashlib.sha256(images.tobytes()).hexdigest() == expected


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=40), st.integers(0, 2**31), st.data())
def test_a_scene_does_not_depend_on_what_is_drawn_with_it(indices, seed, data):
    together = draw_scenes(indices, seed)
    place = data.draw(st.integers(0, len(indices) - 1))
    alone = draw_scenes([indices[place]], seed)
    assert torch.equal(together.images[place], alone.images[0])
    assert torch.equal(together.masks[place], alone.masks[0])
    assert torch.equal(together.centers[place], alone.centers[0])


def test_other_threads_draw_the_same_scenes():
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda i: draw_scenes([i]).images, range(100, 140)))
    assert torch.equal(torch.cat(drawn), draw_scenes(range(100, 140)).images)


def test_seeds_and_splits_share_no_scene():
    found = {
        scene.numpy().tobytes()
        for split in SPLITS
        for seed in (0, 1, 2)
        for scene in Scenes(split, 64, seed=seed).draw(range(64)).images
    }
    assert len(found) == len(SPLITS) * 3 * 64


@pytest.mark.parametrize("degrees", [-180.0, -90.0, -1.0, 0.0, 30.0, 90.0, 179.9, 400.0])
def test_our_own_sine_and_cosine_are_sine_and_cosine(degrees):
    assert sine(np.array([degrees]))[0] == pytest.approx(np.sin(np.radians(degrees)), abs=1e-9)
    assert cosine(np.array([degrees]))[0] == pytest.approx(np.cos(np.radians(degrees)), abs=1e-9)


# ------------------------------------------------------------------------- what is in a scene


def test_a_batch_is_what_it_says():
    batch = draw_scenes(range(40))
    assert batch.images.shape == (40, 3, 64, 64)
    assert batch.masks.shape == (40, 64, 64)
    assert batch.centers.shape == (40, 2)
    assert batch.images.dtype == batch.masks.dtype == batch.centers.dtype == torch.float32
    for values in batch.images, batch.masks, batch.centers:
        assert values.min() >= 0
        assert values.max() <= 1
    assert batch.labels.tolist() == [*range(32), *range(8)]
    assert draw_scenes([]).images.shape == (0, 3, 64, 64)


def test_the_mask_has_the_objects_area_and_its_centroid_is_the_center():
    # Fully inside the frame: radius 0.15 and bell-shaped around the middle.
    batch = draw_scenes(range(256), difficulty=replace(CLEAN, radius=(0.15, 0.15), center_bias=1.0))
    whole = batch.masks[:, [0, -1]].sum((1, 2)) + batch.masks[:, :, [0, -1]].sum((1, 2)) == 0
    assert whole.float().mean() > 0.9
    masks, centers = batch.masks[whole], batch.centers[whole]
    area = masks.sum((1, 2)) / 64**2
    torch.testing.assert_close(area, torch.full_like(area, torch.pi * 0.15**2), rtol=0.02, atol=0)
    pixel = (torch.arange(64) + 0.5) / 64
    y = (masks.sum(2) * pixel).sum(1) / masks.sum((1, 2))
    x = (masks.sum(1) * pixel).sum(1) / masks.sum((1, 2))
    torch.testing.assert_close(torch.stack([y, x], 1), centers, atol=0.1 / 64, rtol=0)


def test_outside_the_mask_nothing_depends_on_the_object():
    one = draw_scenes(range(64), difficulty=replace(CLEAN, texture_contrast=0.3))
    other = draw_scenes(range(64), difficulty=replace(CLEAN, texture_contrast=0.9))
    changed = (one.images != other.images).any(1)
    assert not changed[one.masks == 0].any()
    textured = one.labels % 4 != 0
    assert changed[textured][one.masks[textured] == 1].float().mean() > 0.9
    assert not changed[~textured].any()  # "plain" has no texture to change


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 9), st.floats(0, 1))
def test_inside_the_mask_nothing_depends_on_the_background(index, distractors, contrast):
    other = replace(CLEAN, distractors=(distractors, distractors), contrast=contrast)
    one, two = draw_scenes([index], difficulty=CLEAN), draw_scenes([index], difficulty=other)
    assert torch.equal(one.masks, two.masks)
    covered = (one.masks == 1).expand(3, -1, -1)[None]
    assert torch.equal(one.images[covered], two.images[covered])


# ------------------------------------------------------------------------- what says nothing


def probe(features: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy of a linear classifier, least squares on the first half, on the second half."""
    features = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    half = len(labels) // 2
    targets = torch.nn.functional.one_hot(labels).double()
    weights = torch.linalg.lstsq(features[:half], targets[:half]).solution
    return ((features[half:] @ weights).argmax(1) == labels[half:]).double().mean().item()


@pytest.fixture(scope="module")
def many():
    return draw_scenes(range(32 * 128))


def test_color_place_and_amount_of_light_do_not_give_the_class_away(many):
    objects = (many.images * many.masks[:, None]).sum((2, 3)) / many.masks.sum((1, 2))[:, None]
    hue = objects - objects.mean(1, keepdim=True)
    deviation = (1 / 32 * 31 / 32 / 2048) ** 0.5  # of the accuracy of guessing
    for features in (hue, many.images.mean((2, 3)), many.centers):
        polynomial = torch.cat([features, features**2, features[:, :1] * features[:, 1:2]], 1)
        assert probe(polynomial, many.labels) < 1 / 32 + 4 * deviation


# ------------------------------------------------------------------------- where the object is


@pytest.mark.parametrize(
    "difficulty, uniform",
    [
        # Without a bias to the middle the object is equally likely anywhere; otherwise still in the cells of the grid.
        (replace(SMALL, radius=(0.2, 0.2), center_bias=0.0), lambda centers: (centers - 0.2) / 0.6),
        (SMALL, lambda centers: centers * 8 % 1),
    ],
)
def test_objects_are_anywhere(difficulty, uniform):
    ranks = uniform(draw_scenes(range(4096), difficulty=difficulty).centers.double()).sort(0).values
    steps = torch.linspace(0, 1, 4096, dtype=torch.float64)[:, None]
    assert (ranks - steps).abs().max() < 1.95 / 4096**0.5  # Kolmogorov and Smirnov, 0.1 %


@settings(max_examples=10, deadline=None)
@given(st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)), st.sampled_from([4, 8, 16]))
def test_grid_offset_puts_every_center_at_that_place_in_its_patch(offset, grid):
    centers = draw_scenes(range(32), difficulty=replace(CLEAN, grid_offset=offset, grid=grid)).centers.double()
    cells = centers * 64 / grid - torch.tensor(offset, dtype=torch.float64)
    torch.testing.assert_close(cells, cells.round(), atol=1e-5, rtol=0)


# ------------------------------------------------------------------------- as a data set


def test_items_are_image_label_and_key_as_with_photographs():
    scenes = Scenes("test")
    image, label, key = scenes[17]
    batch = scenes.draw(range(16, 20))
    assert torch.equal(image, batch.images[1])
    images, labels, keys = next(iter(DataLoader(Scenes("test", 20), batch_size=20, num_workers=1)))
    assert torch.equal(images[16:], batch.images) and torch.equal(labels[16:], batch.labels)
    assert list(keys[16:]) == batch.keys
    normal = Scenes("test", transform=Normalize([0.5] * 3, [0.5] * 3))
    torch.testing.assert_close(normal[17][0], image * 2 - 1)
    assert (label, key) == (17, "test/00000017")
    assert len(scenes) == SPLITS["test"]
    assert scenes.classes[label] == "stripes cross"


@pytest.mark.parametrize("size", [8, 33, 64, 100])
def test_any_image_size_can_be_drawn(size):
    batch = draw_scenes(range(33), difficulty=Difficulty(image_size=size))
    assert batch.images.shape == (33, 3, size, size)
    assert batch.masks.mean().item() == pytest.approx(np.pi * 0.24**2, rel=0.15)


# ------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"radius": (0.3, 0.2)}, "radius must be a range"),
        ({"radius": (0.3, 0.6)}, "at most 0.5"),
        ({"radius": (0.0, 0.0)}, "above 0"),
        ({"distractors": (-1, 2)}, "distractors must be a range"),
        ({"noise": float("nan")}, "noise must be between 0 and 1"),
        ({"image_size": 0}, "image_size must be at least 8"),
    ],
)
def test_a_difficulty_that_cannot_be_drawn_is_refused(wrong, told):
    with pytest.raises(InputError, match=told):
        Difficulty(**wrong)


def test_wrong_splits_lengths_and_batch_sizes_are_refused():
    with pytest.raises(InputError, match="did you mean 'validation'"):
        Scenes("validate")
    with pytest.raises(InputError, match="at least one scene"):
        Scenes("test", 0)
    with pytest.raises(IndexError, match="0 to 4, got 5"):
        Scenes("test", 5)[5]
    with pytest.raises(IndexError, match="0 to 4, got -1"):
        Scenes("test", 5)[-1]


# ------------------------------------------------------------------------- a small object in a large picture


@pytest.mark.parametrize("size", [128, 256])
def test_a_needle_is_24_to_40_pixels_across_whatever_the_pictures_size(size):
    batch = draw_scenes(range(64), difficulty=needle(size))
    assert batch.images.shape[-1] == size
    across = 2 * (batch.masks.sum((1, 2)) / torch.pi).sqrt()  # of the disc with the object's area
    inside = batch.masks[:, [0, -1]].sum((1, 2)) + batch.masks[:, :, [0, -1]].sum((1, 2)) == 0  # all of it is seen
    assert across[inside].min() > 24 * 0.97 and across[inside].max() < 40 * 1.03
    assert batch.centers.std(0).min() > 0.2  # anywhere: 0.29 if up to the edges


def test_data_sets_are_found_by_name(tmp_path, monkeypatch):
    assert difficulty_of("scenes") == Difficulty()
    assert difficulty_of("needle") == needle() == needle(192)
    assert difficulty_of("needle:256").image_size == 256
    assert [difficulty_of(name) for name in ("needles", "needle:photos", "scenes:64", "needle:")] == [None] * 4
    with pytest.raises(InputError, match="at least 64 pixels a side, got 32"):
        difficulty_of("needle:32")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needle").mkdir()
    assert difficulty_of("needle") is None  # a folder of that name is meant
