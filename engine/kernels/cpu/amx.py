"""Tile operations of a matrix unit (Intel AMX) for kernels.

A tile is a register of 16 rows with 64 bytes each. Kernels accumulate patches of four float32
tiles, 32 rows by 32 columns or 16 by 64, from tiles of bfloat16: 16 rows with 32 values of the left
matrix, and 16 columns with 32 values of the right one, with pairs interleaved. Each row of a patch
is computed independently of the others.

The instructions are in Intel's Architecture Instruction Set Extensions Programming Reference.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import types

from engine.kernels.cpu.avx512 import LINE, prefetch, stack_memory
from engine.kernels.cpu.compiling import compiles_for
from engine.kernels.cpu.intrinsics import I8, I64, VOID, call, instruction, pointer_to

TILE_ROWS, TILE_BYTES = 16, 64
PATCH_BYTES = 4 * TILE_ROWS * TILE_BYTES
"""Bytes of a patch; in scratch memory, patches are followed by a palette."""
_LEFT, _RIGHT = (4, 5), (6, 7)
"""Registers for tiles of the two operands; the lower ones hold the patch."""
_TALL, _WIDE = (128, (0, 64, 2048, 2112)), (256, (0, 64, 128, 192))
"""Row stride of each patch shape in memory, and the offsets of its tiles, in bytes."""


@cache
def has_tiles() -> bool:
    """Return whether the processor, LLVM and the system support tiles."""
    if not torch.cpu._is_amx_tile_supported():
        return False
    return compiles_for("amx-tile", "amx-bf16", "avx512bf16") and torch.cpu._init_amx()


@cache
def palette(rows: int) -> npt.NDArray[np.uint8]:
    """Return the tile configuration for up to 16 rows of the left matrix."""
    made = np.zeros(64, np.uint8)
    made[0] = 1
    made[16:32].view(np.uint16)[:] = TILE_BYTES
    made[48:56] = rows
    made[48 + np.array(_RIGHT)] = TILE_ROWS
    return made


scratch = stack_memory(2 * PATCH_BYTES + 64)
"""For two patches and a palette."""


def _load(builder: Any, tile: int, address: Any, offset: int, stride: Any) -> None:
    at = pointer_to(builder, address, offset)
    call(builder, "llvm.x86.tileloadd64", VOID, I8(tile), at, stride)


def _load_right(builder: Any, weights: Any) -> None:
    for tile, offset in zip(_RIGHT, (0, 64), strict=True):
        _load(builder, tile, weights, offset, I64(128))


def _multiply(builder: Any, target: int, left: int, right: int) -> None:
    call(builder, "llvm.x86.tdpbf16ps", VOID, I8(target), I8(left), I8(right))


@instruction(types.void, types.int64)
def configure(builder: Any, address: Any) -> None:
    """Load a palette, which clears all tiles."""
    call(builder, "llvm.x86.ldtilecfg", VOID, pointer_to(builder, address))


@instruction(types.void, types.int64)
def keep_configuration(builder: Any, address: Any) -> None:
    """Store the current palette, or the initial one if none is configured."""
    call(builder, "llvm.x86.sttilecfg", VOID, pointer_to(builder, address))


@instruction(types.void)
def clear_patch(builder: Any) -> None:
    """Clear the patch."""
    for tile in range(4):
        call(builder, "llvm.x86.tilezero", VOID, I8(tile))


@instruction(types.void, *[types.int64] * 4)
def multiply_tall(builder: Any, upper: Any, lower: Any, stride: Any, weights: Any) -> None:
    """Accumulate 32 inputs into a patch of 32 by 32.

    Args:
        upper, lower: addresses of 16 rows each, `stride` bytes apart
        weights: address of [16 pairs, 32 columns, 2]
    """
    _load(builder, _LEFT[0], upper, 0, stride)
    _load(builder, _LEFT[1], lower, 0, stride)
    _load_right(builder, weights)
    for tile in range(4):
        _multiply(builder, tile, _LEFT[tile // 2], _RIGHT[tile % 2])


@instruction(types.void, *[types.int64] * 4)
def multiply_wide(builder: Any, rows: Any, stride: Any, weights: Any, more: Any) -> None:
    """Accumulate 32 inputs into a patch of 16 by 64.

    Args:
        rows: address of up to 16 rows, `stride` bytes apart
        weights, more: addresses of [16 pairs, 32 columns, 2] each
    """
    _load(builder, _LEFT[0], rows, 0, stride)
    for first, columns in ((0, weights), (2, more)):
        _load_right(builder, columns)
        for i in (0, 1):
            _multiply(builder, first + i, _LEFT[0], _RIGHT[i])


@instruction(types.void, types.int64)
def load_tall(builder: Any, address: Any) -> None:
    """Load a patch of 32 by 32 from contiguous rows."""
    for tile, offset in enumerate(_TALL[1]):
        _load(builder, tile, address, offset, I64(_TALL[0]))


def _store(builder: Any, address: Any, shape: tuple[int, tuple[int, ...]]) -> None:
    for tile, offset in enumerate(shape[1]):
        at = pointer_to(builder, address, offset)
        call(builder, "llvm.x86.tilestored64", VOID, I8(tile), at, I64(shape[0]))


@instruction(types.void, types.int64)
def store_tall(builder: Any, address: Any) -> None:
    """Store a patch of 32 by 32 as contiguous rows."""
    _store(builder, address, _TALL)


@instruction(types.void, types.int64)
def store_wide(builder: Any, address: Any) -> None:
    """Store a patch of 16 by 64 as contiguous rows."""
    _store(builder, address, _WIDE)


@instruction(types.void, types.int64)
def prefetch_weights(builder: Any, address: Any) -> None:
    """Prefetch [16 pairs, 32 columns, 2] into the L1 cache; any address is allowed."""
    for line in range(32):
        prefetch(builder, address, line * LINE)


@instruction(types.void, types.int64)
def prefetch_patch(builder: Any, address: Any) -> None:
    """Prefetch an eighth of a patch for writing."""
    for line in range(PATCH_BYTES // 8 // LINE):
        prefetch(builder, address, line * LINE, is_write=True)
