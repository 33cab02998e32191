"""A softmax over tiles of keys, in vectors: what was added up before is scaled to a new maximum.

The sums that are kept of a row are one for each lane, the maximum is in all lanes. Keys that a
query does not see have no part in either; a tile without any that it sees changes nothing.
"""

import math
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from engine.models.kernels.vectors import (
    BFLOATS,
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    LINE,
    WORDS,
    call,
    instructions,
    pointer_to,
    spread,
)

LOWEST = -3e38
"""Maximum of no scores."""
_LEAST_POWER = -200.0
"""Two to it is zero in float32."""
_MOST = 100.0
"""Two to it, plus one, is itself in float32."""
_TERMS = [math.log(2) ** n / math.factorial(n) for n in range(6)]
"""Of two to a power of up to a half, within 3e-6."""
_LOADS = 4
"""Vectors of a block of columns."""


def _all(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def _load(builder: Any, address: Any, offset: int = 0) -> Any:
    place = pointer_to(builder, address, offset, FLOATS.as_pointer())
    return builder.load(place, align=LINE)


def _store(builder: Any, vector: Any, address: Any, offset: int = 0) -> None:
    place = pointer_to(builder, address, offset, FLOATS.as_pointer())
    builder.store(vector, place, align=LINE)


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _seen(builder: Any, first: Any, end: Any, vector: int) -> Any:
    """Return which lanes are of keys between two, counted from the first lane of a block."""
    lanes = ir.Constant(WORDS, [vector * LANES + lane for lane in range(LANES)])
    not_before, before = (spread(builder, builder.trunc(each, I32), WORDS) for each in (first, end))
    return builder.and_(
        builder.icmp_signed(">=", lanes, not_before), builder.icmp_signed("<", lanes, before)
    )


def _over_lanes(builder: Any, vector: Any, combine: Any) -> Any:
    """Return what becomes of all lanes, in each of them."""
    size = LANES // 2
    while size:
        swapped = ir.Constant(WORDS, [lane ^ size for lane in range(LANES)])
        other = builder.shuffle_vector(vector, vector, swapped)
        vector = combine(builder, vector, other)
        size //= 2
    return vector


def _power_of_two(builder: Any, x: Any) -> Any:
    """Return two to the powers of a vector, none of them above `_MOST`."""
    x = _larger(builder, x, _all(_LEAST_POWER))
    whole = call(builder, "llvm.rint.v16f32", FLOATS, x)
    rest = builder.fsub(x, whole)
    result = _all(_TERMS[-1])
    for term in reversed(_TERMS[:-1]):
        result = call(builder, "llvm.fma.v16f32", FLOATS, result, rest, _all(term))
    scaled = "llvm.x86.avx512.mask.scalef.ps.512"
    everywhere, rounding = ir.Constant(I16, -1), I32(4)
    return call(builder, scaled, FLOATS, result, whole, result, everywhere, rounding)


@intrinsic  # type: ignore[untyped-decorator]
def cap_scores(_typing: Any, _scores: Any, _cap: Any, _power: Any) -> Any:
    """Bend a block's scores s to cap * tanh(s * scale / cap).

    The others are the bits of the cap, and of scale / cap times twice the logarithm of e to base 2.
    """

    def emit(builder: Any, scores: Any, cap: Any, power: Any) -> None:
        limit, factor = _float_of(builder, cap), _float_of(builder, power)
        for vector in range(_LOADS):
            x = builder.fmul(_load(builder, scores, LINE * vector), factor)
            x = builder.select(builder.fcmp_ordered("<", x, _all(_MOST)), x, _all(_MOST))
            above_one = builder.fadd(_power_of_two(builder, x), _all(1.0))
            tanh = builder.fsub(_all(1.0), builder.fdiv(_all(2.0), above_one))
            _store(builder, builder.fmul(limit, tanh), scores, LINE * vector)

    return instructions(3, emit)


@intrinsic  # type: ignore[untyped-decorator]
def raise_maximum(_typing: Any, _scores: Any, _maximum: Any, _first: Any, _end: Any) -> Any:
    """Raise the maximum of each lane to a block's scores of the keys between two."""

    def emit(builder: Any, scores: Any, maximum: Any, first: Any, end: Any) -> None:
        largest = _load(builder, maximum)
        for vector in range(_LOADS):
            values = _load(builder, scores, LINE * vector)
            values = builder.select(_seen(builder, first, end, vector), values, _all(LOWEST))
            largest = _larger(builder, values, largest)
        _store(builder, largest, maximum)

    return instructions(4, emit)


@intrinsic  # type: ignore[untyped-decorator]
def settle_maximum(
    _typing: Any, _maximum: Any, _settled: Any, _sums: Any, _factor: Any, _scale: Any
) -> Any:
    """Make the maximum one for all lanes, and scale the sums to it.

    Addresses are of the lanes' maximum, the row's, which is replaced, its sums, and where to store
    the factor for what else is added up; the last is the bits of what scores are multiplied by.
    """

    def emit(builder: Any, maximum: Any, settled: Any, sums: Any, factor: Any, scale: Any) -> None:
        largest = _over_lanes(builder, _load(builder, maximum), _larger)
        below = builder.fsub(_load(builder, settled), largest)
        scaling = _power_of_two(builder, builder.fmul(below, _float_of(builder, scale)))
        _store(builder, largest, settled)
        _store(builder, scaling, factor)
        _store(builder, builder.fmul(_load(builder, sums), scaling), sums)

    return instructions(5, emit)


def _float_of(builder: Any, bits: Any) -> Any:
    one = builder.bitcast(builder.trunc(bits, I32), ir.FloatType())
    return spread(builder, one, FLOATS)


@intrinsic  # type: ignore[untyped-decorator]
def store_weights(
    _typing: Any,
    _scores: Any,
    _weights: Any,
    _settled: Any,
    _sums: Any,
    _scale: Any,
    _first: Any,
    _end: Any,
) -> Any:
    """Make weights in bfloat16 of a block's scores, and add them to the sums before they are
    rounded; keys that are not between two have none."""

    def emit(
        builder: Any,
        scores: Any,
        weights: Any,
        settled: Any,
        sums: Any,
        scale: Any,
        first: Any,
        end: Any,
    ) -> None:
        largest, factor = _load(builder, settled), _float_of(builder, scale)
        total = _load(builder, sums)
        for vector in range(_LOADS):
            below = builder.fsub(_load(builder, scores, LINE * vector), largest)
            weight = _power_of_two(builder, builder.fmul(below, factor))
            weight = builder.select(_seen(builder, first, end, vector), weight, _all(0.0))
            total = builder.fadd(total, weight)
            rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", BFLOATS, weight)
            place = pointer_to(builder, weights, LINE // 2 * vector, BFLOATS.as_pointer())
            builder.store(rounded, place, align=LINE // 2)
        _store(builder, total, sums)

    return instructions(7, emit)


@intrinsic  # type: ignore[untyped-decorator]
def add_scaled(_typing: Any, _sums: Any, _factor: Any, _added: Any) -> Any:
    """Multiply a block of sums by a factor and add another one to it."""

    def emit(builder: Any, sums: Any, factor: Any, added: Any) -> None:
        scaling = _load(builder, factor)
        for vector in range(_LOADS):
            at = LINE * vector
            old, new = _load(builder, sums, at), _load(builder, added, at)
            total = call(builder, "llvm.fma.v16f32", FLOATS, old, scaling, new)
            _store(builder, total, sums, at)

    return instructions(3, emit)


@intrinsic  # type: ignore[untyped-decorator]
def store_averages(_typing: Any, _weighted: Any, _sums: Any, _vectors: Any, _target: Any) -> Any:
    """Divide weighted sums, so many vectors, by the sum of the weights; store them in bfloat16."""

    def emit(builder: Any, weighted: Any, sums: Any, vectors: Any, target: Any) -> None:
        total = _over_lanes(builder, _load(builder, sums), lambda builder, a, b: builder.fadd(a, b))
        before = builder.block
        loop, end = (builder.append_basic_block(name) for name in ("vectors", "stored"))
        builder.branch(loop)
        builder.position_at_end(loop)
        vector = builder.phi(I64)
        vector.add_incoming(I64(0), before)
        place = builder.add(weighted, builder.mul(vector, I64(LINE)))
        average = builder.fdiv(_load(builder, place), total)
        rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", BFLOATS, average)
        to = builder.add(target, builder.mul(vector, I64(LINE // 2)))
        builder.store(rounded, pointer_to(builder, to, kind=BFLOATS.as_pointer()), align=2)
        following = builder.add(vector, I64(1))
        vector.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, vectors), loop, end)
        builder.position_at_end(end)

    return instructions(4, emit)
