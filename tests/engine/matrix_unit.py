"""A software matrix unit, for tile kernels on processors without one.

Instructions of tiles become calls of functions here. They do what Intel's reference says, but for
the order in which a multiplication adds up.
"""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llvmlite import ir

from engine.kernels.cpu import amx, compiling
from engine.kernels.cpu.intrinsics import I64, VOID

_TILES, _ROWS, _BYTES, _PALETTE = 8, 16, 64, 64


class _Unit:
    """The state of one thread's unit."""

    def __init__(self) -> None:
        self.palette = np.zeros(_PALETTE, np.uint8)
        self.tiles = np.zeros((_TILES, _ROWS, _BYTES), np.uint8)

    def configure(self, address: int) -> None:
        self.palette = _memory(address, _PALETTE).copy()
        self.tiles[:] = 0

    def store_configuration(self, address: int) -> None:
        _memory(address, _PALETTE)[:] = self.palette

    def clear(self, tile: int) -> None:
        self.tiles[tile] = 0

    def load(self, tile: int, address: int, stride: int) -> None:
        self.tiles[tile] = 0
        for row in range(self._rows(tile)):
            self.tiles[tile, row] = _memory(address + row * stride, _BYTES)

    def store(self, tile: int, address: int, stride: int) -> None:
        for row in range(self._rows(tile)):
            _memory(address + row * stride, _BYTES)[:] = self.tiles[tile, row]

    def multiply(self, target: int, left: int, right: int) -> None:
        sums = self.tiles[target].view(np.float32)
        # The inputs of a row come in pairs, and so do those of a column.
        added = np.einsum("mkp,knp->mn", self._pairs(left), self._pairs(right))
        rows = self._rows(target)
        sums[:rows] += added[:rows]

    def _rows(self, tile: int) -> int:
        assert self.palette[0] == 1, "tiles are not configured"
        return int(self.palette[48 + tile])

    def _pairs(self, tile: int) -> npt.NDArray[np.float32]:
        wide = self.tiles[tile].view(np.uint16).astype(np.uint32) << 16
        pairs: npt.NDArray[np.float32] = wide.view(np.float32).reshape(_ROWS, _ROWS, 2)
        return pairs


def _memory(address: int, size: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


_units: dict[int, _Unit] = defaultdict(_Unit)
"""By thread."""


def _function(method: Callable[..., None], count: int) -> Any:
    def call(*arguments: int) -> None:
        method(_units[threading.get_ident()], *arguments)

    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(call)


_FUNCTIONS = {
    "llvm.x86.ldtilecfg": _function(_Unit.configure, 1),
    "llvm.x86.sttilecfg": _function(_Unit.store_configuration, 1),
    "llvm.x86.tilezero": _function(_Unit.clear, 1),
    "llvm.x86.tileloadd64": _function(_Unit.load, 3),
    "llvm.x86.tilestored64": _function(_Unit.store, 3),
    "llvm.x86.tdpbf16ps": _function(_Unit.multiply, 3),
}


def _call(builder: Any, name: str, _result: Any, *arguments: Any) -> None:
    """Replace an instruction by a call of the function."""
    address = ctypes.cast(_FUNCTIONS[name], ctypes.c_void_p).value
    kind = ir.FunctionType(VOID, [I64] * len(arguments)).as_pointer()
    wide = [
        builder.ptrtoint(each, I64) if isinstance(each.type, ir.PointerType) else each
        for each in arguments
    ]
    wide = [each if each.type == I64 else builder.zext(each, I64) for each in wide]
    builder.call(builder.inttoptr(I64(address), kind), wide)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make newly compiled kernels use the software unit; they are not cached."""
    monkeypatch.setattr(amx, "call", _call)
    monkeypatch.setattr(compiling, "_cache_directory", lambda: None)
