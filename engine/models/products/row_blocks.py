"""Functions of rows whose results do not depend on how many rows there are.

A matrix product adds up in an order that its kernel chooses by the shapes, so a row alone may come
out a little different from the same row in a batch. Here every call has one of some numbers of
rows, for which the results were found to be the same, bit for bit; what is left over is padded.
"""

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.models.module import Module, Rows

logger = logging.getLogger(__name__)

SIZES = (64, 16, 4)
"""Numbers of rows that are tried of functions of which nothing is known."""
_SAFE = (16,)
"""What remains when the tried ones differ: with one shape there is one kernel."""
_FEW = (1, 2, 3)
"""Sizes that some kernels treat like others and some do not."""
_FINE = (*range(4, 129, 4), *range(144, 257, 16), 512)
"""Sizes of float32 products: 16 bits would hide most of what differs."""
_COARSE = (4, *range(8, 65, 8), 128, 256)
"""The same for large ones, of which it takes long to compute so many rows."""
_LARGE = 1 << 18
"""Weights from which on a product is large."""
_LARGEST = _FINE[-1]
_FREE_ROWS = 8
"""Rows that may be added to spare a call."""


def is_by_rows(function: Callable[..., Any]) -> bool:
    """Whether a function is known to compute each row by itself, so that it needs no blocks."""
    return getattr(function, "is_by_rows", False)


class RowBlocks(Module):
    """A function from [rows, in] to [rows, out], called with some numbers of rows only."""

    def __init__(self, function: Rows, probe: Tensor) -> None:
        """Wrap a function that treats rows alike.

        Sizes are found once for all functions that have the same `kernel`, if they have one:
        a tuple of what tells their machine code apart, and of how many weights there are at last.

        Args:
            probe: [512, in] of the right type, for finding out which sizes agree.
        """
        super().__init__()
        self.base = function
        self.sizes = _sizes(function, probe)
        """In ascending order."""
        self._next = _calls(self.sizes)

    def padded(self, rows: int) -> int:
        """Return how many rows to give for so many, which spares this a copy."""
        return max(rows, self._next[rows]) if rows < len(self._next) else rows

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        size = self._next[rows] if rows < len(self._next) else self.sizes[-1]
        if size == rows:
            return self.base(x)
        if size > rows:  # the last row is repeated, which takes one operation
            return self.base(x.index_select(0, repeated(rows, size)))[:rows]
        parts = []
        while len(x) > size:
            parts.append(self.base(x[:size]))
            x = x[size:]
            size = self._next[len(x)] if len(x) < len(self._next) else self.sizes[-1]
        return torch.cat((*parts, self.forward(x)))


@cache
def _calls(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each number of rows what size to begin with: so many, or few more, or less."""
    calls = [0]
    for rows in range(1, sizes[-1] + 1):
        above = next(size for size in sizes if size >= rows)
        below = max((size for size in sizes if size < rows), default=None)
        is_near = above - rows <= max(_FREE_ROWS, rows // 4)
        calls.append(above if is_near or below is None else below)
    return tuple(calls)


def probe_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Return [512, width] of random numbers, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_LARGEST, width, generator=generator).to(dtype)


@cache
def repeated(rows: int, size: int) -> Tensor:
    """Return the index of `size` rows, of which those behind `rows` are the last one again."""
    return torch.arange(size).clamp_(max=rows - 1)


_found: dict[Hashable, tuple[int, ...]] = {}
"""Sizes in ascending order, by kernel, type and number of threads."""


def _sizes(function: Rows, probe: Tensor) -> tuple[int, ...]:
    kernel = getattr(function, "kernel", None)
    if kernel is None or probe.dtype != torch.float32:
        return _agreeing(function, probe[: SIZES[0]], SIZES)
    key = kernel, torch.get_num_threads()
    if key not in _found:
        if kernel[-1] >= _LARGE:
            sizes = _agreeing(function, probe[: _COARSE[-1]], _COARSE)
        else:
            sizes = _agreeing(function, probe, _FINE)
        if sizes == _SAFE:
            sizes = _agreeing(function, probe[: SIZES[0]], SIZES)
        elif _agree(function, probe, _FEW):
            sizes = (*_FEW, *sizes)
        _found[key] = sizes
    return _found[key]


def _agreeing(function: Rows, probe: Tensor, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(sizes)) if _agree(function, probe, sizes) else _SAFE


def _agree(function: Rows, probe: Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether calls with these sizes have the bits of one with all rows, wherever a row is."""
    whole = function(probe)
    for size in sizes:
        last = len(probe) - size
        # All places, or one of many, which differs from size to size.
        few = range(0, last + 1, size) if len(probe) <= SIZES[0] else (7 * size % (last + 1),)
        for first in few:
            part = probe[first : first + size].clone()
            if not torch.equal(function(part), whole[first : first + size]):
                logger.debug("%s rows are not computed like %d", size, len(probe))
                return False
    return True
