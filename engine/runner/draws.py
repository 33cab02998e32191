"""Uniform random numbers as a pure function of a request's seed and a token's position.

A counter-based generator has no state to carry from step to step or from engine to engine: a
preempted, moved or replayed request draws the same numbers again. The function is SplitMix64's
output mix (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014),
applied to the seed, then to the sum of that and the position times the golden gamma, so that
neighbouring seeds and neighbouring positions are both unrelated.
"""

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

UIntArray = npt.NDArray[np.uint64]


def uniform(seeds: UIntArray, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits per (seed, position)."""
    streams = _mix(seeds + _GAMMA)
    bits = _mix(streams + positions.astype(np.uint64) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: UIntArray) -> UIntArray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
