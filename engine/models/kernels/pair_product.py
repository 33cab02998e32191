"""A kernel of products with weights in oneDNN's blocks, on processors that add pairs of bfloat16.

The weights of a block are read from memory for the first rows and from a cache for the others.
"""

from typing import Any

from numba import carray

from engine.models.kernels.compiling import FIRST, MAX_ARGUMENTS, Kernel, own_shares
from engine.models.kernels.pair_sums import GROUP, SUMS_BYTES, WIDTH, adder
from engine.models.kernels.results import part_of, store_results
from engine.models.kernels.vectors import stack_memory

BLOCK = WIDTH
"""Outputs whose weights lie together, [inputs / 2, BLOCK, 2]."""
_add_up = adder(ahead=8)
_scratch = stack_memory(GROUP * SUMS_BYTES)


def _product(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    x, weights, rows, inputs = own[0], own[1], own[6], own[7]
    outputs, column_parts, row_parts = own[8], own[9], own[10]
    num_shares, thread, threads = own_shares(arguments)
    sums = _scratch()
    for share in range(thread, num_shares, threads):
        begin, end = part_of(outputs // BLOCK, share % column_parts, column_parts)
        group, end_group = part_of((rows + GROUP - 1) // GROUP, share // column_parts, row_parts)
        for block in range(begin, end):
            of_block = weights + 2 * BLOCK * block * inputs
            for top in range(group * GROUP, min(end_group * GROUP, rows), GROUP):
                count = min(GROUP, rows - top)
                _add_up(count, x + 2 * top * inputs, 2 * inputs, of_block, inputs // 2, sums)
                store_results(own, sums, SUMS_BYTES, top, count, block * BLOCK, BLOCK)


product = Kernel(_product)
"""See `engine.models.products.compiled`; weights are [outputs / BLOCK, inputs / 2, BLOCK, 2]."""
