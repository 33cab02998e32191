"""Arguments of product kernels, and how they store their sums."""

from typing import Any, NamedTuple

from engine.kernels.cpu.avx512 import LANES, floats_at, store_rounded, widened_at
from engine.kernels.cpu.compiling import arguments_of, compiled


class Product(NamedTuple):
    """The arguments of a product kernel: numbers and addresses; all values are bfloat16."""

    x: int
    """[rows, inputs]"""
    weights: int
    """[outputs / block, inputs / 2, block, 2]; the block size depends on the kernel."""
    bias: int
    """[outputs], or 0"""
    addends: int
    """[rows, outputs], or 0"""
    target: int
    """[rows, outputs]"""
    palette: int
    """Tile configuration for this number of rows; 0 without tiles."""
    rows: int
    inputs: int
    outputs: int
    column_parts: int
    """Number of parts into which the columns are divided."""
    row_parts: int
    """Number of parts into which groups of rows are divided."""
    chunk: int
    """Inputs accumulated at once, with tiles."""


product_arguments = arguments_of(len(Product._fields))


@compiled
def store_results(
    own: Any, sums: int, stride: int, row: int, rows: int, output: int, width: int
) -> None:
    """Add bias and addends, if any, to float32 sums; store them as bfloat16.

    Args:
        own: the arguments of the product
        sums: address, with `stride` bytes per row
        row, output: first row and output
        rows, width: number of rows and outputs
    """
    for i in range(rows):
        for j in range(0, width, LANES):
            values = floats_at(sums + i * stride + 4 * j)
            at = 2 * ((row + i) * own.outputs + output + j)
            if own.bias:
                values = values + widened_at(own.bias + 2 * (output + j))
            if own.addends:
                values = values + widened_at(own.addends + at)
            store_rounded(own.target + at, values)


@compiled
def part_of(whole: int, part: int, parts: int) -> tuple[int, int]:
    """Return the start and end of one of `parts` even parts."""
    return whole * part // parts, whole * (part + 1) // parts
