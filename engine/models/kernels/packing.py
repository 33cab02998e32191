"""How keys and values of a KV cache become columns of `engine.models.kernels.pair_sums`.

Scores add up over pairs of a head's dimensions, so that keys are transposed; results add up over
pairs of keys, so that neighbours' values are interleaved.
"""

from typing import Any

from llvmlite import ir
from numba import carray
from numba.extending import intrinsic

from engine.models.kernels.arithmetic import as_int32, as_int64
from engine.models.kernels.compiling import compiled
from engine.models.kernels.pair_sums import PAIR_BYTES, WIDTH
from engine.models.kernels.vectors import (
    I16,
    I32,
    I64,
    LANES,
    LINE,
    WORDS,
    instructions,
    pointer_to,
)

STRIP = LANES
"""Keys that are transposed together."""
CHUNK = LANES
"""Values of a head that are interleaved together; its dimensions are whole chunks."""
_HALVES = ir.VectorType(I16, LANES)


def _shuffled(builder: Any, one: Any, other: Any, lanes: list[int], width: int = LANES) -> Any:
    """Return lanes of two vectors, counted through both."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, width), lanes))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 words, exchanging blocks of 1, 2, 4 and 8 words."""
    size = 1
    while size < LANES:
        lower = [lane if not lane & size else lane - size + LANES for lane in range(LANES)]
        upper = [lane + size if not lane & size else lane + LANES for lane in range(LANES)]
        for i in range(LANES):
            if not i & size:
                one, other = rows[i], rows[i + size]
                rows[i] = _shuffled(builder, one, other, lower)
                rows[i + size] = _shuffled(builder, one, other, upper)
        size *= 2
    return rows


def _emit_transposition(builder: Any, pairs: int, addresses: Any, offset: Any, target: Any) -> None:
    rows = []
    for key in range(STRIP):
        place = pointer_to(builder, addresses, 8 * key, I64.as_pointer())
        at = builder.add(builder.load(place, align=8), offset)
        rows.append(builder.load(pointer_to(builder, at, kind=WORDS.as_pointer()), align=2))
    for pair, words in enumerate(_transposed(builder, rows)[:pairs]):
        place = pointer_to(builder, target, PAIR_BYTES * pair, WORDS.as_pointer())
        builder.store(words, place, align=LINE)


@intrinsic  # type: ignore[untyped-decorator]
def _transpose(_typing: Any, _addresses: Any, _offset: Any, _target: Any) -> Any:
    """Store 32 dimensions of 16 keys as words of pairs [16 pairs, 16], a pair's columns apart."""

    def emit(builder: Any, addresses: Any, offset: Any, target: Any) -> None:
        _emit_transposition(builder, LANES, addresses, offset, target)

    return instructions(3, emit)


@intrinsic  # type: ignore[untyped-decorator]
def _transpose_half(_typing: Any, _addresses: Any, _offset: Any, _target: Any) -> Any:
    """Store half as many dimensions; what is read behind them belongs to the same token."""

    def emit(builder: Any, addresses: Any, offset: Any, target: Any) -> None:
        _emit_transposition(builder, LANES // 2, addresses, offset, target)

    return instructions(3, emit)


@intrinsic  # type: ignore[untyped-decorator]
def _interleave(_typing: Any, _one: Any, _other: Any, _target: Any) -> Any:
    """Store a chunk of two keys' values as pairs side by side."""

    def emit(builder: Any, one: Any, other: Any, target: Any) -> None:
        first, second = (
            builder.load(pointer_to(builder, each, kind=_HALVES.as_pointer()), align=2)
            for each in (one, other)
        )
        lanes = [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
        words = builder.bitcast(_shuffled(builder, first, second, lanes, 2 * LANES), WORDS)
        builder.store(words, pointer_to(builder, target, kind=WORDS.as_pointer()), align=LINE)

    return instructions(3, emit)


@compiled
def find_keys(
    addresses: int, table: int, block_size: int, first: int, count: int, head: int, row: int
) -> None:
    """Write down where the keys of a tile lie, up to a whole strip: the last one again.

    Args:
        addresses: where to, [keys] int64
        table: address of the row's block table, int32
        block_size: tokens in a block
        first: position of the first key
        count: keys of the tile, one at least
        head: address of the head's first key in the cache
        row: bytes that are stored of a token
    """
    found = carray(as_int64(addresses), (count + STRIP,))
    blocks = carray(as_int32(table), (first // block_size + count + 1,))
    block, at = first // block_size, first % block_size
    here = head + (blocks[block] * block_size + at) * row
    for key in range(count):
        if at == block_size:
            block += 1
            at = 0
            here = head + blocks[block] * block_size * row
        found[key] = here
        at += 1
        here += row
    for key in range(count, (count + STRIP - 1) // STRIP * STRIP):
        found[key] = found[count - 1]


@compiled
def pack_keys(addresses: int, count: int, head_dim: int, packed: int) -> None:
    """Transpose keys, whose addresses are given, to [keys / WIDTH, head_dim / 2, WIDTH, 2].

    What is not in a whole strip behind them stays as it is.
    """
    for strip in range((count + STRIP - 1) // STRIP):
        block, column = strip * STRIP // WIDTH, strip * STRIP % WIDTH
        target = packed + 2 * block * WIDTH * head_dim + 4 * column
        keys, whole = addresses + 8 * strip * STRIP, head_dim // 32 * 32
        for first in range(0, whole, 32):
            _transpose(keys, 2 * first, target + PAIR_BYTES * first // 2)
        if whole < head_dim:
            _transpose_half(keys, 2 * whole, target + PAIR_BYTES * whole // 2)


@compiled
def pack_values(
    addresses: int, behind: int, count: int, most: int, head_dim: int, packed: int
) -> None:
    """Interleave values, which lie `behind` the keys, to [head_dim / WIDTH, most / 2, WIDTH, 2]."""
    found = carray(as_int64(addresses), (count + STRIP,))
    for key in range(0, count, 2):
        one, other = found[key] + behind, found[key + 1] + behind
        for chunk in range(head_dim // CHUNK):
            block, column = chunk * CHUNK // WIDTH, chunk * CHUNK % WIDTH
            target = packed + PAIR_BYTES * (block * most + key) // 2 + 4 * column
            _interleave(one + 2 * chunk * CHUNK, other + 2 * chunk * CHUNK, target)
