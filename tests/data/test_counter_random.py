import numpy as np

from spot.data.counter_random import keys, normals, uniforms, words


def test_words_are_the_published_splitmix64_sequence():
    # The reference implementation (Vigna, prng.di.unimi.it), seeded with 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert words(np.array([1234567], np.uint64), 0, 4).tolist() == [expected]


def test_the_first_numbers_do_not_depend_on_how_many_are_drawn_nor_for_whom():
    np.testing.assert_array_equal(uniforms(keys(3, [5, 9, 11]), 2, 40)[1, :7], uniforms(keys(3, [9]), 2, 7)[0])
    np.testing.assert_array_equal(normals(keys(3, [5, 9, 11]), 2, 41)[1, :7], normals(keys(3, [9]), 2, 7)[0])


def test_uniforms_are_uniform_within_and_between_keys():
    draws = uniforms(keys(0, range(400)), 0, 400)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=16, range=(0, 1))[0]
    assert abs(counts / 10_000 - 1).max() < 0.05  # 5 standard deviations
    assert abs(np.corrcoef(draws.ravel()[:-1], draws.ravel()[1:])[0, 1]) < 0.0125
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.0125


def test_bells_have_mean_0_variance_1_and_light_tails():
    draws = normals(keys(0, range(100)), 0, 1000).astype(np.float64)
    assert abs(draws.mean()) < 0.02
    assert abs(draws.var() - 1) < 0.03
    assert abs((draws**3).mean()) < 0.05
    # Four uniform bytes: excess kurtosis -1.2 / 4, largest value 510 / (256 / sqrt(3)).
    assert abs((draws**4).mean() - 2.7) < 0.1
    assert abs(draws).max() <= 510 / 147.8 + 1e-3
