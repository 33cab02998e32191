"""A product kernel for oneDNN's weight blocks, on processors with bfloat16 dot products.

Memory is always busy with weights: while rows are multiplied with a chunk, the next one is
prefetched into the L2 cache.
"""

from typing import Any

import numpy as np

from engine.kernels.cpu.arithmetic import float32s
from engine.kernels.cpu.avx512 import LINE, stack_memory
from engine.kernels.cpu.compiling import Kernel, compiled_once, thread_shares
from engine.kernels.cpu.pair_sums import GROUP, PAIR_BYTES, SUMS_BYTES, WIDTH, adder
from engine.kernels.cpu.results import Product, part_of, product_arguments, store_results

BLOCK = WIDTH
"""Outputs per block of weights, [inputs / 2, BLOCK, 2]."""
_CHUNK = 512
"""Pairs per chunk; two chunks fit the L2 cache."""
ROWS = 8 * GROUP
"""Rows that share a chunk."""
_AHEAD = 8 * PAIR_BYTES
"""Prefetch distance in bytes for a single group."""
_add_alone = adder(lines=PAIR_BYTES // LINE)
_add_and_read_half = adder(lines=PAIR_BYTES // LINE // 2, continues=True)
_add_and_read_quarter = adder(lines=PAIR_BYTES // LINE // 4, continues=True)
_add = adder(continues=True)
_scratch = stack_memory(ROWS * SUMS_BYTES)
_ZERO = np.float32(0)


@compiled_once
def add_rows(x: int, stride: int, columns: int, pairs: int, sums: int, rows: int) -> None:
    """Sum at most `ROWS` rows of a block into sums [rows, WIDTH] float32.

    Args:
        x: address of the first row's inputs; rows are `stride` bytes apart
        columns: address of the block's weights
        pairs: half the number of inputs
    """
    groups = (rows + GROUP - 1) // GROUP
    if groups == 1:
        _add_alone(rows, x, stride, columns, pairs, sums, columns + _AHEAD)
        return
    start = float32s(sums, rows * WIDTH)
    for i in range(rows * WIDTH):
        start[i] = _ZERO
    each = (rows + groups - 1) // groups
    for first in range(0, pairs, _CHUNK):
        count = min(_CHUNK, pairs - first)
        here, quarter = columns + PAIR_BYTES * first, PAIR_BYTES * count // 4
        left = 4  # quarters of the next chunk still to be prefetched
        for group in range(groups):
            top = each * group
            some = min(each, rows - top)
            inputs, of_rows = x + top * stride + 4 * first, sums + top * SUMS_BYTES
            ahead = here + (8 - left) * quarter
            if left > groups - group:
                _add_and_read_half(some, inputs, stride, here, count, of_rows, ahead)
                left -= 2
            elif left:
                _add_and_read_quarter(some, inputs, stride, here, count, of_rows, ahead)
                left -= 1
            else:
                _add(some, inputs, stride, here, count, of_rows, 0)


def _product(pointer: Any) -> None:
    own = Product(*product_arguments(pointer))
    rows, inputs, column_parts = own.rows, own.inputs, own.column_parts
    num_shares, thread, threads = thread_shares(pointer)
    sums = _scratch()
    for share in range(thread, num_shares, threads):
        begin, end = part_of(own.outputs // BLOCK, share % column_parts, column_parts)
        group, end_group = part_of(
            (rows + GROUP - 1) // GROUP, share // column_parts, own.row_parts
        )
        end_row = min(end_group * GROUP, rows)
        for block in range(begin, end):
            of_block = own.weights + 2 * BLOCK * block * inputs
            for top in range(group * GROUP, end_row, ROWS):
                count = min(ROWS, end_row - top)
                add_rows(own.x + 2 * top * inputs, 2 * inputs, of_block, inputs // 2, sums, count)
                store_results(own, sums, SUMS_BYTES, top, count, block * BLOCK, BLOCK)


product = Kernel(_product, len(Product._fields))
