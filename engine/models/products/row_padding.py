"""Zero padding that avoids oneDNN compiling a product for every number of rows.

oneDNN generates machine code for each new shape, which takes about 0.5 ms. For products of a small
model that is ten times as long as computing them; and prompt lengths, and even more the rows per
expert, differ from step to step. So where rows are cheap, products are computed for one of a few
row counts; the measurements are in benchmarks/results/measurements.md.
"""

import torch.nn.functional as F
from torch import Tensor

_EXACT_ROWS = 16
"""Row counts up to this, as in most decodes, are not padded: they recur in the next step."""
_LARGEST_STEP = 32
_FREE_MULTIPLICATIONS = 1 << 21
"""Maximum multiplications added by padding: about 0.05 ms of a core."""


def padded_rows(rows: int, num_weights: int) -> int:
    """Return the padded row count for a product with `num_weights` weights."""
    free = _FREE_MULTIPLICATIONS // max(1, num_weights)
    if rows <= _EXACT_ROWS or free < 2:
        return rows
    step = min(_LARGEST_STEP, 1 << (free.bit_length() - 1))
    return -(-rows // step) * step


def pad_rows(x: Tensor, num_weights: int) -> Tensor:
    """Return [rows, in] with zero rows appended, or `x` itself if none are needed."""
    rows = len(x)
    size = padded_rows(rows, num_weights)
    return x if size == rows else F.pad(x, (0, 0, 0, size - rows))
