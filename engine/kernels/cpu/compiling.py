"""Compiles kernels and runs them on torch's threads.

A kernel is written in Python. Numba compiles it for this processor to a function of an array of
64-bit integers: addresses of tensors, sizes, and float32 values as their bits.
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numba
import torch
from filelock import FileLock, Timeout
from numba import types

from engine.kernels.cpu.intrinsics import call_address, integers_at
from engine.kernels.cpu.kernel_cache import cache_directory
from engine.kernels.cpu.targets import compile_for_this_machine

_Function = TypeVar("_Function", bound=Callable[..., Any])

_TEAM = 4
"""Integers that precede a kernel's own arguments, for `thread_shares` and `wait_for_others`."""
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PATIENCE = 60.0
"""Seconds to wait for another process that is compiling a kernel, before compiling it too."""
_OPTIONS: dict[str, Any] = {
    # Vectorized sums can use another order than the source, but the same one for every row.
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
}

# Must precede the first decorated function, which fixes Numba's target.
TARGET = compile_for_this_machine()
"""Target of kernels in this process."""


def compiles_for(*features: str) -> bool:
    """Return whether kernels are compiled for processors with these features (LLVM's names)."""
    return TARGET.features.issuperset(features)


def _cache_directory() -> str | None:
    return cache_directory(TARGET.name)


def compiled(function: _Function) -> _Function:
    """Decorate a function that kernels call; it is inlined into each of them."""
    result: _Function = numba.njit(inline="always", **_OPTIONS)(function)
    return result


def compiled_once(function: _Function) -> _Function:
    """Decorate a function that kernels call but do not inline; it is compiled once."""
    result: _Function = numba.njit(**_OPTIONS)(function)
    return result


def arguments_of(count: int) -> Any:
    """Return a function that reads a kernel's `count` own arguments."""
    return integers_at(_TEAM, count)


_team = integers_at(0, _TEAM)


@compiled
def thread_shares(pointer: Any) -> tuple[int, int, int]:
    """Return the number of shares, this thread's first share, and the step to its next.

    OpenMP can provide fewer threads than requested.
    """
    shares, thread, threads, _ = _team(pointer)
    return shares, call_address(thread), call_address(threads)


@compiled
def thread_rows(pointer: Any, rows: int) -> tuple[int, int]:
    """Return the range of this thread's rows."""
    _, thread, threads = thread_shares(pointer)
    return rows * thread // threads, rows * (thread + 1) // threads


@compiled
def wait_for_others(pointer: Any) -> None:
    """Barrier: wait for all threads and see their writes."""
    call_address(_team(pointer)[3])


class _OpenMp(NamedTuple):
    """Functions of the OpenMP runtime used by torch."""

    parallel: Any
    """`GOMP_parallel(function, data, num_threads, flags)`."""
    functions: tuple[int, ...]
    """Addresses of `omp_get_thread_num`, `omp_get_num_threads` and `GOMP_barrier`."""


@cache
def _openmp() -> _OpenMp:
    """Find the runtime: one loaded globally, as LLVM's is, or torch's bundled one.

    Raises:
        OSError: there is none.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "GOMP_parallel"):
        adopt_newer = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
        if not adopt_newer:
            raise OSError("torch bundles no OpenMP runtime")
        library = ctypes.CDLL(str(adopt_newer[0]))
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    functions = library.omp_get_thread_num, library.omp_get_num_threads, library.GOMP_barrier
    addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return _OpenMp(parallel, tuple(address for address in addresses if address is not None))


class Kernel:
    """A compiled function whose work is divided into shares."""

    def __init__(self, body: Callable[[Any], None], arguments: int) -> None:
        """Initialize from the source, which is compiled on first use.

        Args:
            body: takes the pointer that `arguments_of` and `thread_shares` read.
            arguments: number of its own arguments.
        """
        self._body = body
        self._packed = struct.Struct(f"{_TEAM + arguments}q").pack

    def compile_ahead(self) -> None:
        """Compile now, unless another process is compiling it; the first call then waits for that.

        Raises:
            numba.core.errors.NumbaError: compilation fails.
        """
        if "_compiled" not in vars(self):
            with contextlib.suppress(Timeout):
                self._compiled = self._compile_alone(patience=0.0)

    @cached_property
    def _compiled(self) -> Any:
        # Without locks, or after a timeout, several processes compile; the last result is kept.
        with contextlib.suppress(Timeout, NotImplementedError):
            return self._compile_alone(_PATIENCE)
        return self._compile()

    def _compile_alone(self, patience: float) -> Any:
        """Compile under the lock shared with processes that can load the result.

        Raises:
            filelock.Timeout: another process held the lock for `patience` seconds.
            NotImplementedError: the file system has no locks.
        """
        directory = _cache_directory()
        if directory is None:
            return self._compile()
        name = f"{self._body.__module__}.{self._body.__qualname__}.lock"
        with FileLock(os.path.join(directory, name), patience):
            return self._compile()

    def _compile(self) -> Any:
        pointer = types.CPointer(types.int64)
        kept = _cache_directory() is not None
        return numba.cfunc(types.void(pointer), cache=kept, **_OPTIONS)(self._body)

    @cached_property
    def _entry(self) -> Any:
        return _ENTRY(self._compiled.address)

    def __call__(self, shares: int, *arguments: int) -> None:
        """Run with up to one thread per share.

        Raises:
            numba.core.errors.NumbaError: compilation fails.
            OSError: there is no OpenMP runtime.
            struct.error: the number of arguments is wrong.
        """
        openmp = _openmp()
        given = self._packed(shares, *openmp.functions, *arguments)
        if shares == 1:
            self._entry(given)
        else:
            openmp.parallel(self._compiled.address, given, shares, 0)


def threads_for(rows: int, values: int, enough: int) -> int:
    """Return the number of threads for some rows: one if they have fewer than `enough` values."""
    return min(rows, torch.get_num_threads()) if values >= enough else 1


@cache  # called at each call of a norm
def bits_of(value: float) -> int:
    """Return a float's bits, for use as a kernel argument."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits
