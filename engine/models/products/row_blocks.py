"""Row-wise functions whose results do not depend on the number of rows.

A kernel chooses its summation order by shape, so a row computed alone can differ slightly from the
same row in a batch. Here every call has one of several row counts that were found to give
bit-identical results; the remainder is padded.
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
"""Row counts to test for functions of unknown kernels."""
_SAFE = (16,)
"""Fallback if the tested counts differ: one shape always has one kernel."""
_FEW = (1, 2, 3)
"""Counts that only some kernels compute like larger ones."""
_FINE = (*range(4, 129, 4), *range(144, 257, 16), 512)
"""Row counts for float32 products; 16 bits would hide most differences."""
_COARSE = (4, *range(8, 65, 8), 128, 256)
"""Row counts for large products, which take longer to test."""
_LARGE = 1 << 18
"""Minimum weights of a large product."""
_LARGEST = _FINE[-1]
_FREE_ROWS = 8
"""Rows that may be added to save a call."""


def is_row_independent(function: Callable[..., Any]) -> bool:
    """Return whether a function is known to compute each row separately, so needs no blocks."""
    return getattr(function, "is_row_independent", False)


class RowBlocks(Module):
    """A function from [rows, in] to [rows, out], called only with certain row counts."""

    def __init__(self, function: Rows, probe: Tensor) -> None:
        """Wrap a row-wise function.

        Sizes are determined once for all functions with the same `kernel` attribute, if present: a
        tuple of what distinguishes their machine code, ending with the number of weights.

        Args:
            probe: [512, in] of the activation dtype, for comparing sizes.
        """
        super().__init__()
        self.base = function
        self.sizes = _sizes(function, probe)
        """In ascending order."""
        self._next = _calls(self.sizes)

    def padded(self, rows: int) -> int:
        """Return the row count to pass for `rows` rows so that `forward` need not pad."""
        return max(rows, self._next[rows]) if rows < len(self._next) else rows

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        size = self._next[rows] if rows < len(self._next) else self.sizes[-1]
        if size == rows:
            return self.base(x)
        if size > rows:  # repeating the last row takes one operation
            return self.base(x.index_select(0, repeated(rows, size)))[:rows]
        parts = []
        while len(x) > size:
            parts.append(self.base(x[:size]))
            x = x[size:]
            size = self._next[len(x)] if len(x) < len(self._next) else self.sizes[-1]
        return torch.cat((*parts, self.forward(x)))


@cache
def _calls(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the size of the first call for each row count: padded if close, otherwise smaller."""
    calls = [0]
    for rows in range(1, sizes[-1] + 1):
        above = next(size for size in sizes if size >= rows)
        below = max((size for size in sizes if size < rows), default=None)
        is_near = above - rows <= max(_FREE_ROWS, rows // 4)
        calls.append(above if is_near or below is None else below)
    return tuple(calls)


def probe_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Return deterministic random numbers [512, width]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_LARGEST, width, generator=generator).to(dtype)


@cache
def repeated(rows: int, size: int) -> Tensor:
    """Return indices of `size` rows, repeating the last one beyond `rows`."""
    return torch.arange(size).clamp_(max=rows - 1)


_found: dict[Hashable, tuple[int, ...]] = {}
"""Agreeing sizes in ascending order, by kernel and number of threads."""


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
    """Return whether calls of these sizes give the same bits as one call with all rows."""
    whole = function(probe)
    for size in sizes:
        last = len(probe) - size
        # All offsets, or one of many, which differs from size to size.
        few = range(0, last + 1, size) if len(probe) <= SIZES[0] else (7 * size % (last + 1),)
        for first in few:
            part = probe[first : first + size].clone()
            if not torch.equal(function(part), whole[first : first + size]):
                logger.debug("%s rows are not computed like %d", size, len(probe))
                return False
    return True
