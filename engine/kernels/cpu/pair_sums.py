"""Products of pairs of bfloat16, added up in registers, by an instruction of AVX512_BF16.

It adds to each of 16 sums the products of a pair of values. Sums are added up pair by pair in the
order of the inputs, whatever the number of rows.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.cpu.avx512 import (
    FLOATS,
    I32,
    I64,
    LANES,
    LINE,
    WORDS,
    emit_dot,
    in_function,
    instruction,
    load,
    prefetch,
    spread_out,
    store,
)
from engine.kernels.cpu.compiling import compiled

WIDTH = 64
"""Columns whose values lie together, [inputs / 2, WIDTH, 2]."""
GROUP = 6
"""Rows that are computed together: with the columns their sums fill the 32 vector registers."""
PAIR_BYTES = 4 * WIDTH
"""Of the columns of a block for one pair of inputs."""
SUMS_BYTES = 4 * WIDTH
"""Bytes of the sums of a row."""


def _sums_of(rows: int, lines: int, *, continues: bool) -> Any:
    """Return a function that adds up so many rows of a block."""
    places = [(row, LINE * vector) for row in range(rows) for vector in range(WIDTH // LANES)]

    def emit(
        builder: Any, x: Any, stride: Any, columns: Any, pairs: Any, sums: Any, ahead: Any
    ) -> None:
        held = {place: cgutils.alloca_once(builder, FLOATS.as_llvm) for place in places}
        for (row, at), register in held.items():
            zeros = ir.Constant(FLOATS.as_llvm, [0.0] * LANES)
            begin = load(builder, sums, row * SUMS_BYTES + at) if continues else zeros
            builder.store(begin, register)
        of_rows = [builder.add(x, builder.mul(stride, I64(row))) for row in range(rows)]
        with cgutils.for_range(builder, pairs) as loop:
            for line in range(lines):
                following = builder.add(ahead, builder.mul(loop.index, I64(lines * LINE)))
                prefetch(builder, following, line * LINE, level=2)
            here = builder.add(columns, builder.mul(loop.index, I64(PAIR_BYTES)))
            inputs = builder.mul(loop.index, I64(4))
            right = [load(builder, here, LINE * i, WORDS.as_llvm) for i in range(WIDTH // LANES)]
            for (row, at), register in held.items():
                pair = load(builder, builder.add(of_rows[row], inputs), kind=I32)
                left = spread_out(builder, pair, WORDS.as_llvm)
                total = emit_dot(builder, builder.load(register), left, right[at // LINE])
                builder.store(total, register)
        for (row, at), register in held.items():
            store(builder, builder.load(register), sums, row * SUMS_BYTES + at)

    name = f"sums_of_{rows}_rows_{lines}_lines" + "_more" * continues

    @instruction(types.void, *[types.int64] * 6)
    def sums_of_rows(
        builder: Any, x: Any, stride: Any, columns: Any, pairs: Any, sums: Any, ahead: Any
    ) -> None:
        in_function(name, emit)(builder, x, stride, columns, pairs, sums, ahead)

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
