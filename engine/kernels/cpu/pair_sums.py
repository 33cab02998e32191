"""Dot products of bfloat16 pairs, accumulated in registers with AVX512_BF16.

The instruction adds the products of a pair of values to each of 16 sums. Pairs are summed in input
order, whatever the number of rows.
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
"""Columns per block, [inputs / 2, WIDTH, 2]."""
GROUP = 6
"""Rows computed together: with the columns, their sums fill the 32 vector registers."""
PAIR_BYTES = 4 * WIDTH
"""Bytes of a block's columns for one pair of inputs."""
SUMS_BYTES = 4 * WIDTH
"""Bytes of the sums of a row."""


def _emit_sums(builder: Any, arguments: Any, rows: int, lines: int, *, continues: bool) -> None:
    """Emit the sums of `rows` rows of a block; other arguments as in `adder`."""
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
    """Return an internal function of the kernel that sums `rows` rows.

    LLVM optimizes several small functions much faster than one large one.
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
    """Return a kernel function that sums up to a group of rows of a block.

    It takes the number of rows, the address of the first row's inputs, the row stride in bytes, the
    address of columns, the number of input pairs, the address of the sums, [rows, WIDTH] float32,
    and the address to prefetch.

    Args:
        lines: consecutive cache lines prefetched with each pair.
        continues: whether to add to the existing sums.
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
