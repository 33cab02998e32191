"""How kernels are compiled, and run on the threads that torch computes with.

A kernel is written in Python. Numba compiles it for this processor, to a function of one array of
64-bit integers: addresses of tensors, sizes, and floats as the bits that they have in 32.
"""

import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.cpu.claims import claimed
from engine.kernels.cpu.kept import kept_directory
from engine.kernels.cpu.targets import compile_for_this_machine

_Function = TypeVar("_Function", bound=Callable[..., Any])

FIRST = 4
"""Index of a kernel's own arguments in the array; those before are for `own_shares` and
`wait_for_others`."""
MAX_ARGUMENTS = 24
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PATIENCE = 60.0
"""Seconds to wait for another process that compiles a kernel, before doing it as well."""
_OPTIONS: dict[str, Any] = {
    # Vectors may add up in another order than the source, but in the same one for every row.
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
}

# Numba settles what it compiles for when the first function is marked.
TARGET = compile_for_this_machine()
"""Of kernels in this process."""


def compiles_for(*features: str) -> bool:
    """Whether kernels are compiled for processors that have these features, LLVM's names."""
    return TARGET.features.issuperset(features)


def _kept_directory() -> str | None:
    return kept_directory(TARGET.name)


def compiled(function: _Function) -> _Function:
    """Mark a function that kernels call; it is compiled into each of them."""
    result: _Function = numba.njit(inline="always", **_OPTIONS)(function)
    return result


def compiled_apart(function: _Function) -> _Function:
    """Mark a function that kernels call in several places: it is compiled once for all of them."""
    result: _Function = numba.njit(**_OPTIONS)(function)
    return result


@intrinsic  # type: ignore[untyped-decorator]
def _ask(_typing: Any, _address: Any) -> Any:
    """Call `int f(void)` at an address, or `void f(void)` for nothing that means anything."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], function), [])

    return types.int32(types.int64), generate


@compiled
def own_shares(arguments: Any) -> tuple[int, int, int]:
    """Return how many shares there are, the first one of this thread, and the step to its next.

    A team of threads may be smaller than what was asked for.
    """
    return arguments[0], _ask(arguments[1]), _ask(arguments[2])


@compiled
def own_rows(arguments: Any, rows: int) -> tuple[int, int]:
    """Return the first of this thread's rows and the one behind its last."""
    _, thread, threads = own_shares(arguments)
    return rows * thread // threads, rows * (thread + 1) // threads


@compiled
def wait_for_others(arguments: Any) -> None:
    """Go on once all threads are here, and see what they have written."""
    _ask(arguments[3])


class _OpenMp(NamedTuple):
    """Functions of the runtime that torch computes with."""

    parallel: Any
    """`GOMP_parallel(function, data, num_threads, flags)`."""
    functions: tuple[int, ...]
    """Addresses of `omp_get_thread_num`, `omp_get_num_threads` and `GOMP_barrier`."""


@cache
def _openmp() -> _OpenMp:
    """Find the runtime: one that was loaded for all to see, as LLVM's is, or what torch brings.

    Raises:
        OSError: there is none.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "GOMP_parallel"):
        brought = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
        if not brought:
            raise OSError("torch brings no OpenMP runtime")
        library = ctypes.CDLL(str(brought[0]))
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    functions = library.omp_get_thread_num, library.omp_get_num_threads, library.GOMP_barrier
    addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return _OpenMp(parallel, tuple(address for address in addresses if address is not None))


class Kernel:
    """A compiled function that computes its work in shares."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        """Take the source, of a pointer to the arguments; it is compiled when it is first used."""
        self._body = body

    def compile_ahead(self) -> None:
        """Compile it now, unless another process does: then the first call waits for that.

        Raises:
            numba.core.errors.NumbaError: it cannot be compiled.
        """
        with claimed(self._claim, patience=0) as is_ours:
            if is_ours and "_compiled" not in vars(self):
                self._compiled = self._build()

    @cached_property
    def _compiled(self) -> Any:
        with claimed(self._claim, _PATIENCE):
            return self._build()

    @property
    def _claim(self) -> str | None:
        """What a process claims that compiles it, where others can load the result."""
        directory = _kept_directory()
        name = f"{self._body.__module__}.{self._body.__qualname__}.lock"
        return None if directory is None else os.path.join(directory, name)

    def _build(self) -> Any:
        pointer = types.CPointer(types.int64)
        kept = _kept_directory() is not None
        return numba.cfunc(types.void(pointer), cache=kept, **_OPTIONS)(self._body)

    @cached_property
    def _entry(self) -> Any:
        return _ENTRY(self._compiled.address)

    def __call__(self, shares: int, *arguments: int) -> None:
        """Compute, with up to a thread for each share.

        Raises:
            numba.core.errors.NumbaError: it cannot be compiled.
            OSError: there are no threads.
        """
        openmp = _openmp()
        given = _packer(len(arguments))(shares, *openmp.functions, *arguments)
        if shares == 1:
            self._entry(given)
        else:
            openmp.parallel(self._compiled.address, given, shares, 0)


@cache
def _packer(count: int) -> Callable[..., bytes]:
    """Return what lays out so many arguments, in a third of the time of an array of ctypes.

    Raises:
        struct.error: they are more than a kernel has.
    """
    unused = 8 * (MAX_ARGUMENTS - FIRST - count)
    return struct.Struct(f"{FIRST + count}q{unused}x").pack


def threads_for(rows: int, values: int, enough: int) -> int:
    """Return among how many threads rows are divided: one if they have fewer than enough values."""
    return min(rows, torch.get_num_threads()) if values >= enough else 1


@cache  # a norm asks at each of its calls
def bits_of(value: float) -> int:
    """Return a float as the argument of a kernel."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits
