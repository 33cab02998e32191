"""A kernel of products with weights in oneDNN's blocks, on a matrix unit.

Sums are added up in the order of the inputs, 32 at a time, whatever the number of rows.
"""

from typing import Any

from numba import carray

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
from engine.kernels.cpu.compiling import FIRST, MAX_ARGUMENTS, Kernel, compiled, own_shares
from engine.kernels.cpu.results import part_of, store_results

BLOCK = 32
"""Outputs whose weights lie together, [inputs / 2, BLOCK, 2]; also inputs of one multiplication."""
GROUP = 32
"""Rows that are computed together."""
_STEP_BYTES = 2 * BLOCK * BLOCK
"""Of weights that one multiplication takes."""
_AHEAD = 2 * _STEP_BYTES
"""How far ahead weights are read: memory takes as long as some multiplications."""
_PREFETCHED = 8
"""Multiplications before the end of a chunk from which on its patch is read."""


@compiled
def _tall(own: Any, patches: int, block: int, last: int, top: int, is_ahead: bool) -> None:
    """Compute up to 32 and more than 16 rows of one or two blocks of outputs.

    Rows come twice if they are not 32, with the same result.
    """
    x, weights, rows, inputs, chunk = own[0], own[1], own[6], own[7], own[11]
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
                at = weights + 2 * BLOCK * (each * inputs + i)
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
    """Compute the last 16 rows, or all if they are fewer, of one or two blocks of outputs."""
    x, weights, rows, inputs = own[0], own[1], own[6], own[7]
    count = min(rows, TILE_ROWS)
    top = rows - count
    clear_patch()
    for i in range(0, inputs, BLOCK):
        one = weights + 2 * BLOCK * (block * inputs + i)
        other = weights + 2 * BLOCK * (last * inputs + i)
        if is_ahead:
            prefetch_weights(one + _AHEAD)
            prefetch_weights(other + _AHEAD)
        multiply_wide(x + 2 * (top * inputs + i), 2 * inputs, one, other)
    store_wide(patches)
    for each in range(block, last + 1):
        sums = patches + 4 * BLOCK * (each - block)
        store_results(own, sums, 8 * BLOCK, top, count, each * BLOCK, BLOCK)


def _product(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    palette, rows, outputs, column_parts, row_parts = own[5], own[6], own[8], own[9], own[10]
    num_shares, thread, threads = own_shares(arguments)
    patches = scratch()
    kept = patches + 2 * PATCH_BYTES
    keep_configuration(kept)
    configure(palette)
    for share in range(thread, num_shares, threads):
        begin, end = part_of(outputs // BLOCK, share % column_parts, column_parts)
        group, end_group = part_of((rows + GROUP - 1) // GROUP, share // column_parts, row_parts)
        for block in range(begin, end, 2):
            last = min(block + 1, end - 1)
            for top in range(group * GROUP, min(end_group * GROUP, rows), GROUP):
                is_ahead = top == group * GROUP
                if rows - top > TILE_ROWS:
                    _tall(own, patches, block, last, top, is_ahead)
                else:
                    _wide(own, patches, block, last, is_ahead)
    configure(kept)


product = Kernel(_product)
"""See `engine.kernels.cpu.products`; weights are [outputs / BLOCK, inputs / 2, BLOCK, 2]."""
