"""Numbers of keys for which a token's attention is added up in one order.

Keys that a mask hides add zeros, which change no bit of a sum; but by how many keys there are,
hidden ones too, a product chooses how to divide them. Of numbers that are divided alike a token may
get any that holds its keys, so that tokens of different positions share products.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]

STEP = 64
"""Keys by which the numbers differ that follow from a token's position."""
FINE_STEP = 16
"""The same of those that are alike."""
TILE = 512
"""Keys that torch's operator attends to at a time: what holds in one of these holds in all."""
PROBED_KEYS = 2 * TILE
"""Keys beside which those of a tile are computed to compare."""


class KeyWidths:
    """The numbers of keys for which products add up in the same order."""

    def __init__(self, alike: list[int]) -> None:
        """Take those up to a tile, which is one of them."""
        self.alike = tuple(alike)
        self._is_alike = np.zeros(TILE, np.bool_)
        self._is_alike[[width % TILE for width in alike]] = True
        self._unlike = np.cumsum(~self._is_alike[::FINE_STEP])

    def are_alike(self, keys: IntArray) -> npt.NDArray[np.bool_]:
        """Return which of these numbers of keys give the same bits as each other."""
        found: npt.NDArray[np.bool_] = self._is_alike[keys % TILE]
        return found

    def same_order_between(self, low: IntArray, high: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether all multiples of `FINE_STEP` between two numbers are alike."""
        found: npt.NDArray[np.bool_] = self._num_unlike(high) == self._num_unlike(low - FINE_STEP)
        return found

    def _num_unlike(self, keys: IntArray) -> IntArray:
        tiles, rest = keys // TILE, keys % TILE // FINE_STEP
        num_unlike: IntArray = tiles * self._unlike[-1] + self._unlike[rest]
        return num_unlike


def find_widths(attend: Callable[[Tensor, int], Tensor]) -> KeyWidths | None:
    """Return the numbers of keys that agree; None if not even whole tiles do.

    Args:
        attend: from positions [tokens] and a number of keys to what tokens there make of them,
            each token by itself.
    """
    widths = range(FINE_STEP, TILE + 1, FINE_STEP)
    # Where keys are divided into two halves or three thirds, and at the end.
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
