"""Which OpenMP runtime torch computes in; has to be chosen before torch is imported.

Threads wait for the next parallel region by spinning, and only then sleep. While they spin,
LLVM's leave their processor to whoever else wants it (`sched_yield`); those of GNU's libgomp, which
torch brings, do not. Where front ends, other engines or clients share the processors this is the
difference: benchmarks/results/measurements.md.
"""

import ctypes
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

logger = logging.getLogger(__name__)

_PACKAGE = "cmeel-libomp"
_LIBRARY = "libomp.so"

BLOCK_TIME = "500us"
"""How long threads spin before they sleep: the gaps within a step of a large model are shorter."""


_loaded: list[ctypes.CDLL] = []
"""LLVM's runtime, once this process or the one that it was forked from has loaded it."""


def load_openmp() -> bool:
    """Have torch use LLVM's runtime if it is installed; return whether it does.

    torch's libraries ask for libgomp by name, but the dynamic linker first looks for each function
    in what the process has loaded for all to see, and LLVM's runtime has all those of libgomp.
    Nothing is done where the operator has chosen a runtime (`LD_PRELOAD`) or set libgomp's own
    variables (`GOMP_...`), or where torch has been imported.
    """
    runtime = _loaded[0] if _loaded else _load()
    if runtime is None:
        return False
    runtime.omp_get_max_threads()  # which starts it; in a fork anew, on the CPUs of the first start
    # Where it notes that this process has it: a process that is killed would leave that behind.
    Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)
    return True


def _load() -> ctypes.CDLL | None:
    library = None if _is_settled() else installed_library()
    if library is None:
        return None
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("KMP_BLOCKTIME", BLOCK_TIME)
    # The LM head of small models gets a thread more for a moment: it is kept for the next time.
    os.environ.setdefault("KMP_HOT_TEAMS_MODE", "1")
    try:
        _loaded.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    except OSError as error:
        logger.warning("torch's own OpenMP runtime is used: %s", error)
        return None
    return _loaded[0]


def installed_library() -> Path | None:
    """Return the path of LLVM's runtime, if its package is installed."""
    try:
        files = distribution(_PACKAGE).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == _LIBRARY), None)


def _is_settled() -> bool:
    return (
        "torch" in sys.modules
        or "omp" in os.environ.get("LD_PRELOAD", "")
        or any(name.startswith("GOMP_") for name in os.environ)
    )
