"""How kernels of products store what they added up."""

from typing import Any

from engine.kernels.cpu.avx512 import LANES, floats_at, store_rounded, widened_at
from engine.kernels.cpu.compiling import compiled


@compiled
def store_results(
    own: Any, sums: int, stride: int, row: int, rows: int, output: int, width: int
) -> None:
    """Add bias and addends, if there are any, to sums in float32; store them rounded.

    Args:
        own: the arguments of a product: see `engine.kernels.cpu.products`
        sums: address, `stride` bytes from row to row
        row, output: the first ones
        rows, width: how many there are
    """
    bias, addends, target, outputs = own[2], own[3], own[4], own[8]
    for i in range(rows):
        for j in range(0, width, LANES):
            values, at = (
                floats_at(sums + i * stride + 4 * j),
                2 * ((row + i) * outputs + output + j),
            )
            if bias:
                values = values + widened_at(bias + 2 * (output + j))
            if addends:
                values = values + widened_at(addends + at)
            store_rounded(target + at, values)


@compiled
def part_of(whole: int, part: int, parts: int) -> tuple[int, int]:
    """Return where one of even parts begins and ends."""
    return whole * part // parts, whole * (part + 1) // parts
