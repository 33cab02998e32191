"""Functions of rows whose results do not depend on how many rows there are.

A matrix product adds up in an order that its kernel chooses by the shapes, so a row alone may come
out a little different from the same row in a batch. Here every call has one of a few numbers of
rows, for which the results were found to be the same, bit for bit; what is left over is padded.
"""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

SIZES = (64, 16, 4)
"""Numbers of rows that are tried, largest first."""

_SAFE = (16,)
"""What remains when the tried ones differ: with one shape there is one kernel."""


class RowBlocks:
    """A function from [rows, in] to [rows, out], called with a few numbers of rows only."""

    def __init__(self, function: Callable[[Tensor], Tensor], probe: Tensor) -> None:
        """Wrap a function that treats rows alike.

        Args:
            probe: [64, in] of the right type, for finding out which sizes agree.
        """
        self._function = function
        self._sizes = SIZES if _agree(function, probe) else _SAFE

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        if rows in self._sizes:
            return self._function(x)
        outputs = []
        first = 0
        while first < rows:
            left = rows - first
            size = next((size for size in self._sizes if size <= left), None)
            if size is None:  # the last few
                size = self._sizes[-1]
                piece = F.pad(x[first:], (0, 0, 0, size - left))
                outputs.append(self._function(piece)[:left])
            else:
                outputs.append(self._function(x[first : first + size]))
            first += size
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def probe_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Return [64, width] of random numbers, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SIZES[0], width, generator=generator).to(dtype)


def _agree(function: Callable[[Tensor], Tensor], probe: Tensor) -> bool:
    whole = function(probe)
    for size in SIZES[1:]:
        for first in range(0, len(probe), size):
            if not torch.equal(function(probe[first : first + size]), whole[first : first + size]):
                logger.debug("%s rows are not computed like %d", size, len(probe))
                return False
    return True
