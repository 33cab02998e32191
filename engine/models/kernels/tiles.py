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
from numba.extending import intrinsic

from engine.models.kernels.compiling import compiles_for
from engine.models.kernels.vectors import (
    I8,
    I64,
    LINE,
    VOID,
    call,
    instructions,
    pointer_to,
    prefetch,
    stack_memory,
)

TILE_ROWS, TILE_BYTES = 16, 64
PATCH_BYTES = 4 * TILE_ROWS * TILE_BYTES
"""Memory of a patch, behind which there is room for a palette."""
_FEATURES = ("amx-tile", "amx-bf16", "avx512bf16")

_LEFT, _RIGHT = (4, 5), (6, 7)
"""Tiles for parts of the two matrices; those before are the patch."""
_PLACES = {"tall": (128, (0, 64, 2048, 2112)), "wide": (256, (0, 64, 128, 192))}
"""Of each shape of a patch in memory the bytes between rows, and where its tiles begin."""


@cache
def has_tiles() -> bool:
    """Whether kernels may use tiles: the processor and LLVM know them and the system permits it."""
    if not torch.cpu._is_amx_tile_supported() or not compiles_for(*_FEATURES):
        return False
    return torch.cpu._init_amx()


@cache
def palette(rows: int) -> npt.NDArray[np.uint8]:
    """Return the configuration of tiles for so many rows of the left matrix, up to 16."""
    made = np.zeros(64, np.uint8)
    made[0] = 1
    made[16:32].view(np.uint16)[:] = TILE_BYTES
    made[48:56] = rows
    made[48 + np.array(_RIGHT)] = TILE_ROWS
    return made


def _load(builder: Any, tile: int, pointer: Any, stride: Any) -> None:
    call(builder, "llvm.x86.tileloadd64", VOID, I8(tile), pointer, stride)


def _multiply(builder: Any, target: int, left: int, right: int) -> None:
    call(builder, "llvm.x86.tdpbf16ps", VOID, I8(target), I8(left), I8(right))


def _load_right(builder: Any, weights: Any) -> None:
    """Load 32 columns."""
    for tile, offset in zip(_RIGHT, (0, 64), strict=True):
        _load(builder, tile, pointer_to(builder, weights, offset), I64(128))


scratch = stack_memory(2 * PATCH_BYTES + 64)
"""For two patches and a palette."""


@intrinsic  # type: ignore[untyped-decorator]
def configure(_typing: Any, _address: Any) -> Any:
    """Take a palette; all tiles become zero."""

    def emit(builder: Any, address: Any) -> None:
        call(builder, "llvm.x86.ldtilecfg", VOID, pointer_to(builder, address))

    return instructions(1, emit)


@intrinsic  # type: ignore[untyped-decorator]
def keep_configuration(_typing: Any, _address: Any) -> Any:
    """Store the palette that is in use, or the one of no tiles."""

    def emit(builder: Any, address: Any) -> None:
        call(builder, "llvm.x86.sttilecfg", VOID, pointer_to(builder, address))

    return instructions(1, emit)


@intrinsic  # type: ignore[untyped-decorator]
def clear_patch(_typing: Any) -> Any:
    """Make a patch of zeros."""

    def emit(builder: Any) -> None:
        for tile in range(4):
            call(builder, "llvm.x86.tilezero", VOID, I8(tile))

    return instructions(0, emit)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_tall(_typing: Any, _upper: Any, _lower: Any, _stride: Any, _weights: Any) -> Any:
    """Add to a patch of 32 by 32 what 32 values of its rows give.

    Args:
        upper, lower: addresses of 16 rows each, `stride` bytes apart
        weights: address of [16 pairs, 32 columns, 2]
    """

    def emit(builder: Any, upper: Any, lower: Any, stride: Any, weights: Any) -> None:
        for tile, rows in zip(_LEFT, (upper, lower), strict=True):
            _load(builder, tile, pointer_to(builder, rows), stride)
        _load_right(builder, weights)
        for tile in range(4):
            _multiply(builder, tile, _LEFT[tile // 2], _RIGHT[tile % 2])

    return instructions(4, emit)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_wide(_typing: Any, _rows: Any, _stride: Any, _weights: Any, _more: Any) -> Any:
    """Add to a patch of 16 by 64 what 32 values of its rows give.

    Args:
        rows: address of up to 16, `stride` bytes apart
        weights, more: addresses of [16 pairs, 32 columns, 2] each
    """

    def emit(builder: Any, rows: Any, stride: Any, weights: Any, more: Any) -> None:
        _load(builder, _LEFT[0], pointer_to(builder, rows), stride)
        for first, columns in ((0, weights), (2, more)):
            _load_right(builder, columns)
            for i in (0, 1):
                _multiply(builder, first + i, _LEFT[0], _RIGHT[i])

    return instructions(4, emit)


def _move(instruction: str, shape: str, address: Any) -> Any:
    stride, offsets = _PLACES[shape]

    def emit(builder: Any, address: Any) -> None:
        for tile, offset in enumerate(offsets):
            pointer = pointer_to(builder, address, offset)
            call(builder, f"llvm.x86.{instruction}", VOID, I8(tile), pointer, I64(stride))

    return instructions(1, emit)


@intrinsic  # type: ignore[untyped-decorator]
def load_tall(_typing: Any, address: Any) -> Any:
    """Load a patch of 32 by 32, rows side by side."""
    return _move("tileloadd64", "tall", address)


@intrinsic  # type: ignore[untyped-decorator]
def store_tall(_typing: Any, address: Any) -> Any:
    """Store a patch of 32 by 32, rows side by side."""
    return _move("tilestored64", "tall", address)


@intrinsic  # type: ignore[untyped-decorator]
def store_wide(_typing: Any, address: Any) -> Any:
    """Store a patch of 16 by 64, rows side by side."""
    return _move("tilestored64", "wide", address)


def _prefetch(count: int, *, is_write: bool) -> Any:
    def emit(builder: Any, address: Any) -> None:
        for line in range(count):
            prefetch(builder, address, line * LINE, is_write=is_write)

    return instructions(1, emit)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_weights(_typing: Any, _address: Any) -> Any:
    """Have [16 pairs, 32 columns, 2] read into the first cache; the address may be any."""
    return _prefetch(32, is_write=False)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_patch(_typing: Any, _address: Any) -> Any:
    """Have an eighth of a patch read into the caches, as it gets written."""
    return _prefetch(PATCH_BYTES // 8 // LINE, is_write=True)
