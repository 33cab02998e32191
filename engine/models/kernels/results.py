"""How kernels of products store what they added up."""

from typing import Any

from engine.models.kernels.compiling import compiled
from engine.models.kernels.vectors import LANES, add_values, round_values


@compiled
def store_results(
    own: Any, sums: int, stride: int, row: int, rows: int, output: int, width: int
) -> None:
    """Add bias and addends, if there are any, to sums in float32; store them rounded.

    Args:
        own: the arguments of a product: see `engine.models.products.compiled`
        sums: address, `stride` bytes from row to row
        row, output: the first ones
        rows, width: how many there are
    """
    bias, addends, target, outputs = own[2], own[3], own[4], own[8]
    for i in range(rows):
        for j in range(0, width, LANES):
            here, at = sums + i * stride + 4 * j, 2 * ((row + i) * outputs + output + j)
            if bias:
                add_values(here, bias + 2 * (output + j))
            if addends:
                add_values(here, addends + at)
            round_values(here, target + at)


@compiled
def part_of(whole: int, part: int, parts: int) -> tuple[int, int]:
    """Return where one of even parts begins and ends."""
    return whole * part // parts, whole * (part + 1) // parts
