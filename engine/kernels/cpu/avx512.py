"""AVX-512 vectors for kernels: a type of 16 32-bit lanes, and the instructions on it.

Kernels load, compute and store vectors in Python like scalars. Addresses are integers.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core.datamodel import models, register_default
from numba.extending import overload

from engine.kernels.cpu.compiling import compiles_for
from engine.kernels.cpu.intrinsics import I8, I16, I32, I64, VOID, call, instruction, pointer_to

LINE = 64
"""Bytes of a cache line and of a vector."""
LANES = 16

_BITS, _HALVES, _INDEX = (ir.VectorType(ir.IntType(bits), LANES) for bits in (1, 16, 32))
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16 type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS, _PAIRS = (ir.VectorType(_BFloat(), lanes) for lanes in (LANES, 2 * LANES))


class Vector(types.Type):  # type: ignore[misc]
    """Numba's type of a vector register."""

    def __init__(self, name: str, as_llvm: Any) -> None:
        super().__init__(name)
        self.as_llvm = as_llvm


@register_default(Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.as_llvm)


FLOATS = Vector("floats", _FLOATS)
WORDS = Vector("words", _INDEX)
"""16 pairs of bfloat16, or 32-bit integers."""
MASK = Vector("mask", _BITS)


@cache
def has_pairs() -> bool:
    """Return whether the processor and LLVM support dot products of bfloat16 pairs."""
    return torch.cpu._is_avx512_bf16_supported() and compiles_for("avx512bf16")


def load(builder: Any, address: Any, offset: int = 0, kind: Any = _FLOATS) -> Any:
    """Emit a load; like all vector loads and stores, it needs only 2-byte alignment."""
    return builder.load(pointer_to(builder, address, offset, kind), align=2)


def store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    """Emit a store."""
    builder.store(value, pointer_to(builder, address, offset, value.type), align=2)


def spread_out(builder: Any, value: Any, kind: Any) -> Any:
    """Emit a vector with `value` in all lanes."""
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, value, I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_INDEX, [0] * LANES))


def emit_dot(builder: Any, sums: Any, left: Any, right: Any) -> Any:
    """Emit sums plus the dot products of bfloat16 pairs in words."""
    pairs = (builder.bitcast(each, _PAIRS) for each in (left, right))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, sums, *pairs)


def prefetch(
    builder: Any, address: Any, offset: int = 0, *, level: int = 1, is_write: bool = False
) -> None:
    """Emit a prefetch of a line into this cache level; any address is allowed."""
    hints = I32(int(is_write)), I32(4 - level), I32(1)
    call(builder, "llvm.prefetch.p0", VOID, pointer_to(builder, address, offset), *hints)


def stack_memory(num_bytes: int) -> Any:
    """Return a function that returns the address of memory on its caller's stack."""

    @instruction(types.int64)
    def address(builder: Any) -> Any:
        # Numba's own function clears the memory, which LLVM compiles to a byte loop.
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(I8, num_bytes))
        memory.align = LINE
        return builder.ptrtoint(memory, I64)

    return address


@instruction(FLOATS, types.int64)
def floats_at(builder: Any, address: Any) -> Any:
    """Load 16 values of float32."""
    return load(builder, address)


@instruction(FLOATS, types.int64)
def widened_at(builder: Any, address: Any) -> Any:
    """Load 16 values of bfloat16."""
    wide = builder.zext(load(builder, address, kind=_HALVES), _INDEX)
    return builder.bitcast(builder.shl(wide, ir.Constant(_INDEX, [16] * LANES)), _FLOATS)


@instruction(types.void, types.int64, FLOATS)
def store_floats(builder: Any, address: Any, values: Any) -> None:
    """Store 16 values of float32."""
    store(builder, values, address)


@instruction(types.void, types.int64, FLOATS)
def store_rounded(builder: Any, address: Any, values: Any) -> None:
    """Store 16 values as bfloat16."""
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _BFLOATS, values)
    store(builder, rounded, address)


@instruction(FLOATS, types.float32)
def spread(builder: Any, value: Any) -> Any:
    """Return a vector with one value in all lanes."""
    return spread_out(builder, value, _FLOATS)


@instruction(FLOATS, FLOATS, FLOATS)
def maximum(builder: Any, one: Any, other: Any) -> Any:
    """Return the lanewise maximum; if a comparison involves NaN, `other`."""
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


@instruction(FLOATS, FLOATS, FLOATS)
def minimum(builder: Any, one: Any, other: Any) -> Any:
    """Return the lanewise minimum; if a comparison involves NaN, `other`."""
    return builder.select(builder.fcmp_ordered("<", one, other), one, other)


@instruction(FLOATS, FLOATS, FLOATS, FLOATS)
def multiply_add(builder: Any, one: Any, other: Any, added: Any) -> Any:
    """Return one * other + added, rounded once."""
    return call(builder, "llvm.fma.v16f32", _FLOATS, one, other, added)


@instruction(FLOATS, FLOATS)
def nearest_whole(builder: Any, values: Any) -> Any:
    """Round to the nearest integers."""
    return call(builder, "llvm.rint.v16f32", _FLOATS, values)


@instruction(FLOATS, FLOATS, FLOATS)
def times_power_of_two(builder: Any, values: Any, power: Any) -> Any:
    """Return values * 2**power, for integral powers."""
    everywhere, rounding = ir.Constant(I16, -1), I32(4)
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return call(builder, name, _FLOATS, values, power, values, everywhere, rounding)


@instruction(MASK, types.int64, types.int64)
def lanes_between(builder: Any, first: Any, end: Any) -> Any:
    """Return a mask of the lanes from `first` up to `end`; either can be out of range."""
    lanes = ir.Constant(_INDEX, list(range(LANES)))
    begin, behind = (spread_out(builder, builder.trunc(x, I32), _INDEX) for x in (first, end))
    return builder.and_(
        builder.icmp_signed(">=", lanes, begin), builder.icmp_signed("<", lanes, behind)
    )


@instruction(FLOATS, MASK, FLOATS, FLOATS)
def where(builder: Any, mask: Any, one: Any, other: Any) -> Any:
    """Return `one` in the lanes of the mask, `other` elsewhere."""
    return builder.select(mask, one, other)


def _over_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    for size in (8, 4, 2, 1):
        swapped = ir.Constant(_INDEX, [lane ^ size for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, swapped))
    return vector


@instruction(FLOATS, FLOATS)
def largest_lane(builder: Any, values: Any) -> Any:
    """Return the largest value, in all lanes."""
    return _over_lanes(
        builder, values, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)
    )


@instruction(FLOATS, FLOATS)
def sum_of_lanes(builder: Any, values: Any) -> Any:
    """Return the sum of all values, in all lanes."""
    return _over_lanes(builder, values, builder.fadd)


def _define(symbol: Callable[[Any, Any], Any], name: str) -> None:
    @instruction(FLOATS, FLOATS, FLOATS)
    def compute(builder: Any, one: Any, other: Any) -> Any:
        return getattr(builder, name)(one, other)

    def implementation(one: Any, other: Any) -> Any:
        return compute(one, other)

    @overload(symbol, inline="always")  # type: ignore[untyped-decorator]
    def of_vectors(one: Any, other: Any) -> Any:
        return implementation if one is FLOATS and other is FLOATS else None


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define(_symbol, _name)


@instruction(types.void, types.int64, types.int64, types.int64)
def interleave(builder: Any, one: Any, other: Any, target: Any) -> None:
    """Store 16 bfloat16 values of two rows each as interleaved pairs."""
    first, second = (load(builder, each, kind=_HALVES) for each in (one, other))
    lanes = [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
    mask = ir.Constant(ir.VectorType(I32, 2 * LANES), lanes)
    store(builder, builder.shuffle_vector(first, second, mask), target)


def transposition(pairs: int, row_bytes: int) -> Any:
    """Return a function that transposes `pairs` (at most 16) bfloat16 pairs of 16 rows.

    It takes the address of 16 row addresses, a byte offset added to each, and the target, where
    each pair's 16 values are contiguous, `row_bytes` apart. It reads 16 pairs of each row.
    """

    @instruction(types.void, types.int64, types.int64, types.int64)
    def transpose(builder: Any, addresses: Any, offset: Any, target: Any) -> None:
        rows = []
        for row in range(LANES):
            at = builder.add(load(builder, addresses, 8 * row, I64), offset)
            rows.append(load(builder, at, kind=_INDEX))
        for size in (1, 2, 4, 8):  # size of exchanged blocks
            lanes = range(LANES)
            lower = [lane - size + LANES if lane & size else lane for lane in lanes]
            upper = [lane + LANES if lane & size else lane + size for lane in lanes]
            for i in (i for i in lanes if not i & size):
                pair = rows[i], rows[i + size]
                rows[i], rows[i + size] = (
                    builder.shuffle_vector(*pair, ir.Constant(_INDEX, each))
                    for each in (lower, upper)
                )
        for i in range(pairs):
            store(builder, rows[i], target, row_bytes * i)

    return transpose
