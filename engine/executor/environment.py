"""What has to be settled before torch is imported: CPUs, the OpenMP runtime, variables.

What the environment says already is left alone.

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

from engine.executor.layout import Layout
from engine.shared.config import EngineConfig
from engine.shared.cpu.machine import bind_process, cpu_quota

logger = logging.getLogger(__name__)

SPIN_COUNT = 10_000
"""Iterations of libgomp's wait loop, of about 0.05 us each: some 0.5 ms, as with LLVM's runtime."""

CACHED_PRIMITIVES = 256
"""Compiled oneDNN operations kept, in each of its two caches; a model's step uses about ten."""

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
    is_settled = (
        "torch" in sys.modules
        or "omp" in os.environ.get("LD_PRELOAD", "")
        or any(name.startswith("GOMP_") for name in os.environ)
    )
    library = None if is_settled else installed_library()
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


def settle_environment(processes: int = 1) -> None:
    """Have compute threads sleep soon, bound what oneDNN keeps, and use huge pages.

    `processes`: how many share the cores that this one may use.

    Between two parallel regions of a step threads wait for some 0.2 ms, so a spin of that length
    spares them the way through the kernel, which in a virtual machine takes as long again. LLVM's
    OpenMP runtime is best at that, but a process with one core has nobody to wait for and keeps
    libgomp, as it was measured. Where libgomp has to serve, its
    default of 300,000 iterations is for machines that do nothing else: when front ends, other
    engines or anything at all share the processors, a thread that waits for one that is not
    running burns its whole time slice, and steps get many times slower.

    oneDNN compiles every operation anew for every number of rows (see
    `engine.models.products.row_padding`) and keeps 1,024 of them with their buffers: more than a
    gigabyte for a model of ten megabytes.

    Tensors of 2 MB and more are asked for in huge pages, which Linux gives where it may: weights
    are read through once a step, and with small pages a tenth of that time is looking up pages.
    """
    has_team = num_cores() > processes
    if not (has_team and load_openmp()) and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(CACHED_PRIMITIVES))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def num_cores() -> int:
    """Return how many cores this process may use, within the CPU quota of its control group.

    More threads than the quota has CPUs use it up early in each period, and all stop for the rest.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    if quota is not None:
        cores = min(cores or 1, int(quota))
    return max(1, cores or 1)


def sharers(config: EngineConfig, engines_on_node: int) -> int:
    """Return how many processes compute on the CPUs that this one may use."""
    if config.executor.bound_to:
        return 1
    return engines_on_node * config.parallel.processes_on_node


def bound(config: EngineConfig, rank: int = 0) -> EngineConfig:
    """Bind this process as its engine's settings say; return the settings that hold from now on.

    Before torch is imported: its threads get what the thread has that starts them.

    Args:
        rank: this process's among the engine's; the leader's is 0.
    """
    lists = config.executor.bound_to
    number = Layout.of(config.parallel).number(rank)
    if number < len(lists) and bind_process(lists[number]):
        return config
    return config.changed(executor={"cpu_bind": "none"})
