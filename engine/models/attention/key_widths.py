"""Key counts for which a token's attention is summed in the same order.

Masked keys add zeros, which change no bit of a sum, but the key count, including masked keys,
determines how a product partitions them. Counts that are partitioned alike are interchangeable for
a token whose keys they cover, so tokens at different positions can share products.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]

STEP = 64
"""Granularity of key counts derived from a token's position."""
FINE_STEP = 16
"""Granularity of interchangeable key counts."""
TILE = 512
"""Keys per iteration of torch's operator: what holds within one tile holds for all."""
PROBED_KEYS = 2 * TILE
"""Key count used as the reference when comparing a tile."""


class KeyWidths:
    """Key counts for which products sum in the same order."""

    def __init__(self, alike: list[int]) -> None:
        """Initialize from the interchangeable counts up to `TILE`, which must be among them."""
        self.alike = tuple(alike)
        self._is_alike = np.zeros(TILE, np.bool_)
        self._is_alike[[width % TILE for width in alike]] = True
        self._unlike = np.cumsum(~self._is_alike[::FINE_STEP])

    def are_alike(self, keys: IntArray) -> npt.NDArray[np.bool_]:
        """Return which of these key counts are interchangeable."""
        found: npt.NDArray[np.bool_] = self._is_alike[keys % TILE]
        return found

    def same_order_between(self, low: IntArray, high: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether all multiples of `FINE_STEP` between two counts are interchangeable."""
        found: npt.NDArray[np.bool_] = self._num_unlike(high) == self._num_unlike(low - FINE_STEP)
        return found

    def _num_unlike(self, keys: IntArray) -> IntArray:
        tiles, rest = keys // TILE, keys % TILE // FINE_STEP
        num_unlike: IntArray = tiles * self._unlike[-1] + self._unlike[rest]
        return num_unlike


def find_widths(attend: Callable[[Tensor, int], Tensor]) -> KeyWidths | None:
    """Return the interchangeable key counts; None if not even whole tiles agree.

    Args:
        attend: maps positions [tokens] and a key count to attention results, computing each token
            separately.
    """
    widths = range(FINE_STEP, TILE + 1, FINE_STEP)
    # Around the splits into halves and thirds, and at the end.
    positions = torch.tensor(
        [[width // 2 + 1, (2 * width) // 3 + 1, width - 1] for width in widths]
    )
    in_tile = attend(positions.flatten(), TILE).view(*positions.shape, -1)
    alike = [
        width
        for width, places, expected in zip(widths, positions, in_tile, strict=True)
        if torch.equal(attend(places, PROBED_KEYS if width == TILE else width), expected)
    ]
    return KeyWidths(alike) if TILE in alike else None
