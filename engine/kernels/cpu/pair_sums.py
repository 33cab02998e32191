"""Products of pairs of bfloat16, added up in registers, by an instruction of AVX512_BF16.

It adds to each of 16 sums the products of a pair of values. Sums are added up pair by pair in the
order of the inputs, whatever the number of rows.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.cpu.avx512 import (
    FLOATS,
    LANES,
    LINE,
    WORDS,
    emit_dot,
    load,
    prefetch,
    spread_out,
    store,
)
from engine.kernels.cpu.intrinsics import I32, I64, VOID, instruction

WIDTH = 64
"""Columns whose values lie together, [inputs / 2, WIDTH, 2]."""
GROUP = 6
"""Rows that are computed together: with the columns their sums fill the 32 vector registers."""
PAIR_BYTES = 4 * WIDTH
"""Of the columns of a block for one pair of inputs."""
SUMS_BYTES = 4 * WIDTH
"""Bytes of the sums of a row."""


def _emit_sums(builder: Any, arguments: Any, rows: int, lines: int, *, continues: bool) -> None:
    """Emit the sums of so many rows of a block; the other arguments are those of `adder`."""
    x, stride, columns, pairs, sums, ahead = arguments
    places = [(row, LINE * vector) for row in range(rows) for vector in range(WIDTH // LANES)]
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


def _sums_of(module: Any, rows: int, lines: int, *, continues: bool) -> Any:
    """Return a function of the kernel's own that adds up so many rows.

    LLVM takes much longer to optimize one large function than some small ones.
    """
    name = f"sums_of_{rows}_rows_{lines}_lines" + "_more" * continues
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(VOID, [I64] * 6), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block())
        _emit_sums(inside, function.args, rows, lines, continues=continues)
        inside.ret_void()
    return function


def adder(*, lines: int = 0, continues: bool = False) -> Any:
    """Return a function that adds up to a group of rows of a block, for kernels to call.

    It takes the number of rows, the address of the first one's inputs, bytes between rows, the
    address of columns, how many pairs of inputs there are, the address of the sums, [rows, WIDTH]
    float32, and what is read ahead.

    Args:
        lines: of a cache that are read ahead with each pair, one behind the other.
        continues: whether to go on with what the sums are.
    """

    @instruction(types.void, *[types.int64] * 7)
    def add_up(
        builder: Any,
        rows: Any,
        x: Any,
        stride: Any,
        columns: Any,
        pairs: Any,
        sums: Any,
        ahead: Any,
    ) -> None:
        end = builder.append_basic_block()
        choice = builder.switch(rows, end)
        for number in range(1, GROUP + 1):
            with builder.goto_block(builder.append_basic_block()):
                choice.add_case(I64(number), builder.block)
                function = _sums_of(builder.module, number, lines, continues=continues)
                builder.call(function, (x, stride, columns, pairs, sums, ahead))
                builder.branch(end)
        builder.position_at_end(end)

    return add_up
