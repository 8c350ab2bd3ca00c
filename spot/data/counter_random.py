"""Counter-based random numbers, a function of (seed, index, stream): SplitMix64 in integer arithmetic.

Libraries may change their generators between versions. These numbers never change, and those of one
index do not depend on other draws.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GAMMA = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea, Flood 2014): a counter times this, then mixed


def mix64(words: Words) -> Words:
    """SplitMix64's finalizer, a bijection of 64-bit words. Each output bit depends on each input bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def keys(seed: int, indices: Sequence[int] | NDArray[np.int64]) -> Words:
    """One key per scene (B,), which determines all its random numbers."""
    start = mix64(np.array([seed], np.int64).astype(np.uint64) + np.uint64(GAMMA))
    return mix64(start + np.asarray(indices, np.int64).astype(np.uint64) * np.uint64(GAMMA))


def words(key: Words, stream: int, count: int) -> Words:
    """`count` random words for each key, (B, count). Streams of a key do not overlap."""
    counters = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 24)
    return mix64(key[:, None] + counters * np.uint64(GAMMA))


def uniforms(key: Words, stream: int, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each key, (B, count)."""
    return (words(key, stream, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(key: Words, stream: int, count: int) -> NDArray[np.float32]:
    """`count` approximately normal numbers (mean 0, variance 1) for each key, (B, count): sums of four bytes."""
    halves = words(key, stream, (count + 1) // 2).astype("<u8", copy=False).view("<u4")[:, :count]
    pairs = (halves & np.uint32(0x00FF00FF)) + ((halves >> np.uint32(8)) & np.uint32(0x00FF00FF))
    total = (pairs + (pairs >> np.uint32(16))) & np.uint32(0x7FF)
    return (total.astype(np.float32) - np.float32(510)) * np.float32(1 / 147.8005)
