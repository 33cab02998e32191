"""Packs keys and values of a KV cache into columns for `engine.kernels.cpu.pair_sums`.

Scores sum over pairs of head dimensions, so keys are transposed; results sum over pairs of keys, so
values of adjacent keys are interleaved.
"""

from engine.kernels.cpu.arithmetic import int32s, int64s
from engine.kernels.cpu.avx512 import LANES, interleave, transposition
from engine.kernels.cpu.compiling import compiled
from engine.kernels.cpu.pair_sums import PAIR_BYTES, WIDTH

STRIP = LANES
"""Keys transposed together."""
CHUNK = LANES
"""Values interleaved together; head sizes are multiples of it."""

_transpose = transposition(LANES, PAIR_BYTES)
_transpose_half = transposition(LANES // 2, PAIR_BYTES)
"""It reads beyond the half, but within the same token."""


@compiled
def find_keys(
    addresses: int, table: int, block_size: int, first: int, count: int, head: int, row: int
) -> None:
    """Write the addresses of a tile's keys, repeating the last one up to a whole strip.

    Args:
        addresses: target, [keys] int64
        table: address of the row's block table, int32
        block_size: tokens per block
        first: position of the first key
        count: keys of the tile, at least one
        head: address of the head's first key in the cache
        row: bytes stored per token
    """
    found = int64s(addresses, count + STRIP)
    blocks = int32s(table, first // block_size + count + 1)
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
    """Transpose keys at the given addresses to [keys / WIDTH, head_dim / 2, WIDTH, 2].

    Columns beyond the last strip are left unchanged.
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
    addresses: int, behind: int, count: int, room: int, head_dim: int, packed: int
) -> None:
    """Interleave values, `behind` bytes after keys: [head_dim / WIDTH, room / 2, WIDTH, 2]."""
    found = int64s(addresses, count + STRIP)
    for key in range(0, count, 2):
        one, other = found[key] + behind, found[key + 1] + behind
        for chunk in range(head_dim // CHUNK):
            block, column = chunk * CHUNK // WIDTH, chunk * CHUNK % WIDTH
            target = packed + PAIR_BYTES * (block * room + key) // 2 + 4 * column
            interleave(one + 2 * chunk * CHUNK, other + 2 * chunk * CHUNK, target)
