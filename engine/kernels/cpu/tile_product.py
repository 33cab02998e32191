"""A product kernel for oneDNN's weight blocks, on a matrix unit.

Inputs are summed in order, 32 at a time, whatever the number of rows.
"""

from typing import Any

from engine.kernels.cpu.amx import (
    PATCH_BYTES,
    TILE_ROWS,
    clear_patch,
    configure,
    keep_configuration,
    load_tall,
    multiply_tall,
    multiply_wide,
    prefetch_patch,
    prefetch_weights,
    scratch,
    store_tall,
    store_wide,
)
from engine.kernels.cpu.compiling import Kernel, compiled, thread_shares
from engine.kernels.cpu.results import Product, part_of, product_arguments, store_results

BLOCK = 32
"""Outputs per block of weights, [inputs / 2, BLOCK, 2]; also the inputs per multiplication."""
GROUP = 32
"""Rows computed together."""
_STEP_BYTES = 2 * BLOCK * BLOCK
"""Bytes of weights per multiplication."""
_AHEAD = 2 * _STEP_BYTES
"""Prefetch distance: memory latency spans several multiplications."""
_PREFETCHED = 8
"""Number of final multiplications of a chunk during which its patch is prefetched."""


@compiled
def _tall(own: Any, patches: int, block: int, last: int, top: int, is_ahead: bool) -> None:
    """Compute 17 to 32 rows of one or two blocks of outputs.

    With fewer than 32 rows, some are computed twice, with the same result.
    """
    x, rows, inputs, chunk = own.x, own.rows, own.inputs, own.chunk
    lower = min(top + TILE_ROWS, rows - TILE_ROWS)
    for first in range(0, inputs, chunk):
        end = min(first + chunk, inputs)
        for each in range(block, last + 1):
            patch = patches + (each - block) * PATCH_BYTES
            if first:
                load_tall(patch)
            else:
                clear_patch()
            for i in range(first, end, BLOCK):
                at = own.weights + 2 * BLOCK * (each * inputs + i)
                if is_ahead:
                    prefetch_weights(at + _AHEAD)
                left = (end - i) // BLOCK - 1
                if left < _PREFETCHED:
                    prefetch_patch(patch + left * (PATCH_BYTES // _PREFETCHED))
                above, below = x + 2 * (top * inputs + i), x + 2 * (lower * inputs + i)
                multiply_tall(above, below, 2 * inputs, at)
            store_tall(patch)
    for each in range(block, last + 1):
        patch = patches + (each - block) * PATCH_BYTES
        store_results(own, patch, 4 * BLOCK, top, TILE_ROWS, each * BLOCK, BLOCK)
        store_results(
            own, patch + PATCH_BYTES // 2, 4 * BLOCK, lower, TILE_ROWS, each * BLOCK, BLOCK
        )


@compiled
def _wide(own: Any, patches: int, block: int, last: int, is_ahead: bool) -> None:
    """Compute the last 16 rows, or all if there are fewer, of one or two blocks of outputs."""
    inputs, count = own.inputs, min(own.rows, TILE_ROWS)
    top = own.rows - count
    clear_patch()
    for i in range(0, inputs, BLOCK):
        one = own.weights + 2 * BLOCK * (block * inputs + i)
        other = own.weights + 2 * BLOCK * (last * inputs + i)
        if is_ahead:
            prefetch_weights(one + _AHEAD)
            prefetch_weights(other + _AHEAD)
        multiply_wide(own.x + 2 * (top * inputs + i), 2 * inputs, one, other)
    store_wide(patches)
    for each in range(block, last + 1):
        sums = patches + 4 * BLOCK * (each - block)
        store_results(own, sums, 8 * BLOCK, top, count, each * BLOCK, BLOCK)


def _product(pointer: Any) -> None:
    own = Product(*product_arguments(pointer))
    rows, column_parts = own.rows, own.column_parts
    num_shares, thread, threads = thread_shares(pointer)
    patches = scratch()
    kept = patches + 2 * PATCH_BYTES
    keep_configuration(kept)
    configure(own.palette)
    for share in range(thread, num_shares, threads):
        begin, end = part_of(own.outputs // BLOCK, share % column_parts, column_parts)
        group, end_group = part_of(
            (rows + GROUP - 1) // GROUP, share // column_parts, own.row_parts
        )
        for block in range(begin, end, 2):
            last = min(block + 1, end - 1)
            for top in range(group * GROUP, min(end_group * GROUP, rows), GROUP):
                is_ahead = top == group * GROUP
                if rows - top > TILE_ROWS:
                    _tall(own, patches, block, last, top, is_ahead)
                else:
                    _wide(own, patches, block, last, is_ahead)
    configure(kept)


product = Kernel(_product, len(Product._fields))
