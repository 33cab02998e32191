"""Tiles of a matrix unit (Intel AMX), as kernels use them.

A tile is a register of 16 rows with 64 bytes each. Kernels add up patches of four tiles of float32,
32 rows by 32 columns or 16 by 64, from tiles of bfloat16: 16 rows with 32 values of the left
matrix, and 16 columns with 32 values of the right one, of which pairs lie side by side. What a row
of a patch gets does not depend on the others.

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
"""Memory of a patch, behind which there is room for a palette."""
_LEFT, _RIGHT = (4, 5), (6, 7)
"""Tiles for parts of the two matrices; those before are the patch."""
_TALL, _WIDE = (128, (0, 64, 2048, 2112)), (256, (0, 64, 128, 192))
"""Of each shape of a patch in memory the bytes between rows, and where its tiles begin."""


@cache
def has_tiles() -> bool:
    """Whether kernels may use tiles: the processor and LLVM know them and the system permits it."""
    if not torch.cpu._is_amx_tile_supported():
        return False
    return compiles_for("amx-tile", "amx-bf16", "avx512bf16") and torch.cpu._init_amx()


@cache
def palette(rows: int) -> npt.NDArray[np.uint8]:
    """Return the configuration of tiles for so many rows of the left matrix, up to 16."""
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
    """Take a palette; all tiles become zero."""
    call(builder, "llvm.x86.ldtilecfg", VOID, pointer_to(builder, address))


@instruction(types.void, types.int64)
def keep_configuration(builder: Any, address: Any) -> None:
    """Store the palette that is in use, or the one of no tiles."""
    call(builder, "llvm.x86.sttilecfg", VOID, pointer_to(builder, address))


@instruction(types.void)
def clear_patch(builder: Any) -> None:
    """Make a patch of zeros."""
    for tile in range(4):
        call(builder, "llvm.x86.tilezero", VOID, I8(tile))


@instruction(types.void, *[types.int64] * 4)
def multiply_tall(builder: Any, upper: Any, lower: Any, stride: Any, weights: Any) -> None:
    """Add to a patch of 32 by 32 what 32 values of its rows give.

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
    """Add to a patch of 16 by 64 what 32 values of its rows give.

    Args:
        rows: address of up to 16, `stride` bytes apart
        weights, more: addresses of [16 pairs, 32 columns, 2] each
    """
    _load(builder, _LEFT[0], rows, 0, stride)
    for first, columns in ((0, weights), (2, more)):
        _load_right(builder, columns)
        for i in (0, 1):
            _multiply(builder, first + i, _LEFT[0], _RIGHT[i])


@instruction(types.void, types.int64)
def load_tall(builder: Any, address: Any) -> None:
    """Load a patch of 32 by 32, rows side by side."""
    for tile, offset in enumerate(_TALL[1]):
        _load(builder, tile, address, offset, I64(_TALL[0]))


def _store(builder: Any, address: Any, shape: tuple[int, tuple[int, ...]]) -> None:
    for tile, offset in enumerate(shape[1]):
        at = pointer_to(builder, address, offset)
        call(builder, "llvm.x86.tilestored64", VOID, I8(tile), at, I64(shape[0]))


@instruction(types.void, types.int64)
def store_tall(builder: Any, address: Any) -> None:
    """Store a patch of 32 by 32, rows side by side."""
    _store(builder, address, _TALL)


@instruction(types.void, types.int64)
def store_wide(builder: Any, address: Any) -> None:
    """Store a patch of 16 by 64, rows side by side."""
    _store(builder, address, _WIDE)


@instruction(types.void, types.int64)
def prefetch_weights(builder: Any, address: Any) -> None:
    """Have [16 pairs, 32 columns, 2] read into the first cache; the address may be any."""
    for line in range(32):
        prefetch(builder, address, line * LINE)


@instruction(types.void, types.int64)
def prefetch_patch(builder: Any, address: Any) -> None:
    """Have an eighth of a patch read into the caches, as it gets written."""
    for line in range(PATCH_BYTES // 8 // LINE):
        prefetch(builder, address, line * LINE, is_write=True)
