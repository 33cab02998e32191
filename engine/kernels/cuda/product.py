"""A matrix product in which no row's bits depend on the number of rows.

Every result is summed by one program over all inputs in order, never split among programs depending
on their number (He et al., "Defeating Nondeterminism in LLM Inference", 2025).
"""

import triton
import triton.language as tl

_ROWS_TOGETHER = tl.constexpr(8)
"""Row tiles whose programs are adjacent, so that they share cached weights."""


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Compute one tile of results per program; all tensors but `bias` have one 16-bit dtype.

    Args:
        x: [rows, NUM_INPUTS]
        weight: [NUM_OUTPUTS, NUM_INPUTS]
        bias: [NUM_OUTPUTS], if HAS_BIAS
        sums: [rows, NUM_OUTPUTS], added before results are rounded, if HAS_SUMS
        out: like `sums`, which it can be
    """
    across = tl.cdiv(rows, ROWS)
    down = tl.cdiv(NUM_OUTPUTS, OUTPUTS)
    # Groups of row tiles, each through all outputs.
    number = tl.program_id(0)
    in_group = _ROWS_TOGETHER * down
    first = number // in_group * _ROWS_TOGETHER
    size = tl.minimum(across - first, _ROWS_TOGETHER)
    row_tile = first + number % in_group % size
    output_tile = number % in_group // size

    row = row_tile * ROWS + tl.arange(0, ROWS)
    output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, INPUTS)
    is_row, is_output = row < rows, output < NUM_OUTPUTS
    a = x + row.to(tl.int64)[:, None] * NUM_INPUTS + inputs[None, :]
    b = weight + output.to(tl.int64)[None, :] * NUM_INPUTS + inputs[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, NUM_INPUTS, INPUTS):
        is_input = inputs < NUM_INPUTS - start
        left = tl.load(a + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
        right = tl.load(b + start, mask=is_output[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(left, right, total)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :]
    mask = is_row[:, None] & is_output[None, :]
    if HAS_SUMS:
        total += tl.load(sums + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
