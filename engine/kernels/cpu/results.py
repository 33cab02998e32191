"""What kernels of products take, and how they store what they added up."""

from typing import Any, NamedTuple

from engine.kernels.cpu.avx512 import LANES, floats_at, store_rounded, widened_at
from engine.kernels.cpu.compiling import arguments_of, compiled


class Product(NamedTuple):
    """The arguments of such a kernel. All values are bfloat16; all but numbers are addresses."""

    x: int
    """[rows, inputs]"""
    weights: int
    """[outputs / block, inputs / 2, block, 2]: the kernel says how many outputs are a block."""
    bias: int
    """[outputs], or 0"""
    addends: int
    """[rows, outputs], or 0"""
    target: int
    """[rows, outputs]"""
    palette: int
    """Of tiles for this number of rows; 0 without tiles."""
    rows: int
    inputs: int
    outputs: int
    column_parts: int
    """In how many parts the columns are divided."""
    row_parts: int
    """The same of groups of rows."""
    chunk: int
    """Inputs that are added up at once, by tiles."""


product_arguments = arguments_of(len(Product._fields))


@compiled
def store_results(
    own: Any, sums: int, stride: int, row: int, rows: int, output: int, width: int
) -> None:
    """Add bias and addends, if there are any, to sums in float32; store them rounded.

    Args:
        own: the arguments of a product
        sums: address, `stride` bytes from row to row
        row, output: the first ones
        rows, width: how many there are
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
    """Return where one of even parts begins and ends."""
    return whole * part // parts, whole * (part + 1) // parts
