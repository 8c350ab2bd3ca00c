import random

import numpy as np
import torch

from spot.draws import Draw, generator, seeded


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_named_draw_is_the_same_every_time_and_others_differ():
    with seeded(1, Draw.MIX, 3):
        first = draws()
    random.random()
    with seeded(1, Draw.MIX, 3):
        assert draws() == first
    with seeded(1, Draw.MIX, 4):
        assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_global_generators_are_left_as_they_were():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = draws()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    with seeded(1, Draw.MIX):
        draws()
    assert draws() == expected


def test_near_names_give_unrelated_seeds():
    seeds = {generator(seed, Draw.PLACE, step).initial_seed() for seed in range(30) for step in range(30)}
    assert len(seeds) == 900
    means = [torch.rand(100, generator=generator(0, Draw.PLACE, step)).mean().item() for step in range(50)]
    assert 0.4 < sum(means) / 50 < 0.6


def test_no_two_draws_of_a_run_share_their_random_numbers():
    """A step whose number was that of another draw's name used to place tokens with that draw's numbers."""
    names = {(draw, step, number) for draw in Draw for step in range(40) for number in range(4)}
    seeds = [generator(0, draw, step, number).initial_seed() for draw, step, number in names]
    assert len(set(seeds)) == len(names)
    assert len({draw.value for draw in Draw}) == len(Draw.__members__)
