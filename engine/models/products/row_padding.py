"""Zero rows that spare oneDNN from compiling a product anew for every number of rows.

oneDNN generates machine code for each shape that it meets, which takes about 0.5 ms. For products
of a small model that is ten times as long as computing them, and the lengths of prompts, and even
more the shares of a batch that experts get, differ from step to step. So where rows are cheap a
product is computed for one of a few numbers of rows; the measurements are in
benchmarks/results/measurements.md.
"""

import torch.nn.functional as F
from torch import Tensor

_EXACT_ROWS = 16
"""Up to so many rows, as most decodes have, nothing is added: they come again in the next step."""
_LARGEST_STEP = 32
_FREE_MULTIPLICATIONS = 1 << 21
"""Multiplications that may be added: some 0.05 ms of a core."""


def padded_rows(rows: int, num_weights: int) -> int:
    """Return for how many rows a product with so many weights is computed."""
    free = _FREE_MULTIPLICATIONS // max(1, num_weights)
    if rows <= _EXACT_ROWS or free < 2:
        return rows
    step = min(_LARGEST_STEP, 1 << (free.bit_length() - 1))
    return -(-rows // step) * step


def pad_rows(x: Tensor, num_weights: int) -> Tensor:
    """Return [rows, in] with rows of zeros behind, or `x` itself if none are needed."""
    rows = len(x)
    size = padded_rows(rows, num_weights)
    return x if size == rows else F.pad(x, (0, 0, 0, size - rows))
