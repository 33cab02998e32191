"""Uniform numbers keyed by seed and position."""

import numpy as np

from engine.runner.categorical import uniform

KNOWN = [0.28176129772258496, 0.6524484863740322, 0.8628561488610587, 0.31482353407721675]


def test_known_values_stay_the_same() -> None:
    """A change here would change every seeded answer that clients have seen."""
    drawn = uniform(np.array([0, 0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 0, 12345]))
    assert drawn.tolist() == KNOWN


def test_numbers_are_uniform_and_uncorrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    drawn = uniform(seeds.ravel(), positions.ravel()).reshape(300, 300)
    assert 0 <= drawn.min() < drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    expected = drawn.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 50  # 19 degrees of freedom
    for shifted in (np.roll(drawn, 1, axis=0), np.roll(drawn, 1, axis=1), drawn.T):
        off_diagonal = ~np.eye(300, dtype=bool)
        assert abs(np.corrcoef(drawn[off_diagonal], shifted[off_diagonal])[0, 1]) < 0.02
