import random

import numpy as np
import torch

from spot.training.randomness import generator, mixed, seeded


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_named_draw_is_the_same_every_time_and_others_differ():
    with seeded(1, 2, 3):
        first = draws()
    random.random()
    with seeded(1, 2, 3):
        assert draws() == first
    with seeded(1, 2, 4):
        assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_global_generators_are_left_as_they_were():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = draws()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    with seeded(1):
        draws()
    assert draws() == expected


def test_near_names_give_unrelated_seeds():
    seeds = {mixed(seed, step) for seed in range(30) for step in range(30)}
    assert len(seeds) == 900
    means = [torch.rand(100, generator=generator(0, step)).mean().item() for step in range(50)]
    assert 0.4 < sum(means) / 50 < 0.6
