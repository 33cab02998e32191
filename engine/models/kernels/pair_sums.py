"""Products of pairs of bfloat16, added up in registers, by an instruction of AVX512_BF16.

It adds to each of 16 sums the products of a pair of values. Sums are added up pair by pair in the
order of the inputs, whatever the number of rows.
"""

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba.extending import intrinsic

from engine.models.kernels.compiling import compiled, compiles_for
from engine.models.kernels.vectors import (
    FLOATS,
    I32,
    I64,
    LANES,
    LINE,
    PAIRS,
    WORDS,
    call,
    in_function,
    instructions,
    pointer_to,
    prefetch,
    spread,
)

WIDTH = 64
"""Columns whose values lie together, [inputs / 2, WIDTH, 2]."""
GROUP = 6
"""Rows that are computed together: with the columns their sums fill the 32 vector registers."""
PAIR_BYTES = 4 * WIDTH
"""Of the columns of a block for one pair of inputs."""
SUMS_BYTES = 4 * WIDTH
"""Bytes of the sums of a row."""
_VECTORS = WIDTH // LANES


@cache
def has_pairs() -> bool:
    """Whether the processor, and LLVM, add pairs of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() and compiles_for("avx512bf16")


def _emit_sums(builder: Any, rows: int, lines: int, continues: bool, arguments: Any) -> None:
    """Add up some rows of a block in registers, through a loop over pairs."""
    x, stride, columns_at, pairs, sums, ahead = arguments
    before = builder.block
    loop, end = (builder.append_basic_block(name) for name in ("pairs", "summed"))
    of_rows = [builder.add(x, builder.mul(stride, I64(row))) for row in range(rows)]
    places = [
        [_place(builder, sums, row, vector) for vector in range(_VECTORS)] for row in range(rows)
    ]
    zeros = ir.Constant(FLOATS, [0.0] * LANES)
    begins = [
        [builder.load(place, align=LINE) if continues else zeros for place in of_row]
        for of_row in places
    ]
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(I64)
    pair.add_incoming(I64(0), before)
    held = [[builder.phi(FLOATS) for _ in range(_VECTORS)] for _ in range(rows)]
    for line in range(lines):
        following = builder.add(ahead, builder.mul(pair, I64(lines * LINE)))
        prefetch(builder, following, line * LINE, level=2)
    at = builder.add(columns_at, builder.mul(pair, I64(PAIR_BYTES)))
    columns = []
    for vector in range(_VECTORS):
        place = pointer_to(builder, at, LINE * vector, PAIRS.as_pointer())
        columns.append(builder.load(place, align=LINE))
    added: list[list[Any]] = []
    for row in of_rows:
        place = pointer_to(
            builder, builder.add(row, builder.mul(pair, I64(4))), 0, I32.as_pointer()
        )
        values = builder.bitcast(spread(builder, builder.load(place, align=4), WORDS), PAIRS)
        added.append(
            [
                call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sum_, values, column)
                for sum_, column in zip(held[len(added)], columns, strict=True)
            ]
        )
    following = builder.add(pair, I64(1))
    pair.add_incoming(following, loop)
    for sums_of_row, first, new in zip(held, begins, added, strict=True):
        for phi, begin, value in zip(sums_of_row, first, new, strict=True):
            phi.add_incoming(begin, before)
            phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, end)
    builder.position_at_end(end)
    for of_row, new in zip(places, added, strict=True):
        for place, value in zip(of_row, new, strict=True):
            builder.store(value, place, align=LINE)


def _place(builder: Any, sums: Any, row: int, vector: int) -> Any:
    offset = row * SUMS_BYTES + LINE * vector
    return pointer_to(builder, sums, offset, FLOATS.as_pointer())


def _sums_of(rows: int, lines: int, *, continues: bool) -> Any:
    """Return a function that adds up so many rows of a block."""

    def emit(builder: Any, *arguments: Any) -> None:
        _emit_sums(builder, rows, lines, continues, arguments)

    name = f"sums_of_{rows}_rows_{lines}_lines" + "_more" * continues

    @intrinsic  # type: ignore[untyped-decorator]
    def sums_of_rows(
        _typing: Any, _x: Any, _stride: Any, _columns: Any, _pairs: Any, _sums: Any, _ahead: Any
    ) -> Any:
        return instructions(6, in_function(name, emit))

    return sums_of_rows


@cache
def adder(*, lines: int = 0, continues: bool = False) -> Any:
    """Return a function that adds up to a group of rows of a block, for kernels to call.

    It takes the number of rows, the address of the first one's inputs, bytes between rows, the
    address of columns, how many pairs of inputs there are, the address of the sums, [rows, WIDTH]
    float32, and what is read ahead.

    Args:
        lines: of a cache that are read ahead with each pair, one behind the other.
        continues: whether to go on with what the sums are.
    """
    one, two, three, four, five, six = (
        _sums_of(rows, lines, continues=continues) for rows in range(1, GROUP + 1)
    )

    @compiled
    def add_up(
        rows: int, x: int, stride: int, columns: int, pairs: int, sums: int, ahead: int
    ) -> None:
        if rows == 1:
            one(x, stride, columns, pairs, sums, ahead)
        elif rows == 2:
            two(x, stride, columns, pairs, sums, ahead)
        elif rows == 3:
            three(x, stride, columns, pairs, sums, ahead)
        elif rows == 4:
            four(x, stride, columns, pairs, sums, ahead)
        elif rows == 5:
            five(x, stride, columns, pairs, sums, ahead)
        else:
            six(x, stride, columns, pairs, sums, ahead)

    return add_up
