"""A kernel of products with weights in oneDNN's blocks, on processors that add pairs of bfloat16.

An instruction (AVX512_BF16) adds to each of 16 sums the products of a pair of inputs. Sums are
added up pair by pair in the order of the inputs, whatever the number of rows. The weights of a
block are read from memory for the first rows and from a cache for the others.
"""

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import carray
from numba.extending import intrinsic

from engine.models.kernels.compiling import FIRST, MAX_ARGUMENTS, Kernel, compiled, own_shares
from engine.models.kernels.results import part_of, store_results
from engine.models.kernels.vectors import (
    FLOATS,
    I32,
    I64,
    LANES,
    LINE,
    PAIRS,
    WORDS,
    call,
    compiles_for,
    instructions,
    pointer_to,
    prefetch,
    stack_memory,
)

BLOCK = 64
"""Outputs whose weights lie together, [inputs / 2, BLOCK, 2]."""
GROUP = 6
"""Rows that are computed together: with the weights their sums fill the 32 vector registers."""
_VECTORS = BLOCK // LANES
_PAIR_BYTES = 4 * BLOCK
"""Of the weights of a block for one pair of inputs."""
_SUMS = 4 * BLOCK
"""Bytes of the sums of a row."""
_AHEAD = 8 * _PAIR_BYTES
"""How far ahead weights are read."""


@cache
def has_pairs() -> bool:
    """Whether the processor, and LLVM, add pairs of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() and compiles_for("avx512bf16")


def _emit_sums(builder: Any, rows: int, arguments: Any) -> None:
    """Add up some rows of a block in registers, through a loop over pairs."""
    x, stride, weights, pairs, sums = arguments
    before = builder.block
    loop, end = (builder.append_basic_block(name) for name in ("pairs", "summed"))
    of_rows = [builder.add(x, builder.mul(stride, I64(row))) for row in range(rows)]
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(I64)
    pair.add_incoming(I64(0), before)
    held = [[builder.phi(FLOATS) for _ in range(_VECTORS)] for _ in range(rows)]
    at = builder.add(weights, builder.mul(pair, I64(_PAIR_BYTES)))
    columns = []
    for vector in range(_VECTORS):
        prefetch(builder, at, _AHEAD + LINE * vector)
        place = pointer_to(builder, at, LINE * vector, PAIRS.as_pointer())
        columns.append(builder.load(place, align=LINE))
    added: list[list[Any]] = []
    for row in of_rows:
        place = pointer_to(
            builder, builder.add(row, builder.mul(pair, I64(4))), 0, I32.as_pointer()
        )
        values = _spread(builder, builder.load(place, align=4))
        added.append(
            [
                call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sum_, values, column)
                for sum_, column in zip(held[len(added)], columns, strict=True)
            ]
        )
    following = builder.add(pair, I64(1))
    pair.add_incoming(following, loop)
    for sums_of_row, new in zip(held, added, strict=True):
        for phi, value in zip(sums_of_row, new, strict=True):
            phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
            phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, end)
    builder.position_at_end(end)
    for row, new in enumerate(added):
        for vector, value in enumerate(new):
            offset = row * _SUMS + LINE * vector
            builder.store(value, pointer_to(builder, sums, offset, FLOATS.as_pointer()), align=LINE)


def _spread(builder: Any, word: Any) -> Any:
    """Return a vector with a pair of values in all its places."""
    nothing = ir.Constant(WORDS, ir.Undefined)
    one = builder.insert_element(nothing, word, I32(0))
    everywhere = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.bitcast(builder.shuffle_vector(one, nothing, everywhere), PAIRS)


def _sums_of(rows: int) -> Any:
    """Return a function that adds up so many rows of a block."""

    @intrinsic  # type: ignore[untyped-decorator]
    def sums_of_rows(
        _typing: Any, _x: Any, _stride: Any, _weights: Any, _pairs: Any, _sums: Any
    ) -> Any:
        def emit(builder: Any, *arguments: Any) -> None:
            _emit_sums(builder, rows, arguments)

        return instructions(5, emit)

    return sums_of_rows


_one, _two, _three, _four, _five, _six = (_sums_of(rows) for rows in range(1, GROUP + 1))


_scratch = stack_memory(GROUP * _SUMS)


@compiled
def _add_up(rows: int, x: int, stride: int, weights: int, pairs: int, sums: int) -> None:
    """Add up to a group of rows of a block; `stride` bytes are between rows."""
    if rows == 1:
        _one(x, stride, weights, pairs, sums)
    elif rows == 2:
        _two(x, stride, weights, pairs, sums)
    elif rows == 3:
        _three(x, stride, weights, pairs, sums)
    elif rows == 4:
        _four(x, stride, weights, pairs, sums)
    elif rows == 5:
        _five(x, stride, weights, pairs, sums)
    else:
        _six(x, stride, weights, pairs, sums)


def _product(pointer: Any) -> None:
    arguments = carray(pointer, (MAX_ARGUMENTS,))
    own = arguments[FIRST:]
    x, weights, rows, inputs = own[0], own[1], own[6], own[7]
    outputs, column_parts, row_parts = own[8], own[9], own[10]
    num_shares, thread, threads = own_shares(arguments)
    sums = _scratch()
    for share in range(thread, num_shares, threads):
        begin, end = part_of(outputs // BLOCK, share % column_parts, column_parts)
        group, end_group = part_of((rows + GROUP - 1) // GROUP, share // column_parts, row_parts)
        for block in range(begin, end):
            of_block = weights + 2 * BLOCK * block * inputs
            for top in range(group * GROUP, min(end_group * GROUP, rows), GROUP):
                count = min(GROUP, rows - top)
                _add_up(count, x + 2 * top * inputs, 2 * inputs, of_block, inputs // 2, sums)
                store_results(own, sums, _SUMS, top, count, block * BLOCK, BLOCK)


product = Kernel(_product)
"""See `engine.models.products.compiled`; weights are [outputs / BLOCK, inputs / 2, BLOCK, 2]."""
