"""Process setup before torch is imported: CPU binding, the OpenMP runtime, variables.

Variables already set in the environment are not changed.

Threads wait for the next parallel region by spinning before they sleep. While spinning, LLVM's
runtime yields its CPU to other threads (`sched_yield`); GNU's libgomp, which torch bundles, does
not. If front ends, other engines or clients share the CPUs this matters:
benchmarks/results/measurements.md.
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
"""Iterations of libgomp's wait loop at about 0.05 us each: about 0.5 ms, as in LLVM's runtime."""

CACHED_PRIMITIVES = 256
"""Compiled oneDNN operations kept in each of its two caches; a model's step uses about ten."""

_PACKAGE = "cmeel-libomp"
_LIBRARY = "libomp.so"

BLOCK_TIME = "500us"
"""Spin time of threads before they sleep: longer than the gaps within a step of a large model."""

_loaded: list[ctypes.CDLL] = []
"""LLVM's runtime, once loaded by this process or by the process it was forked from."""


def load_openmp() -> bool:
    """Make torch use LLVM's runtime if it is installed; return whether it does.

    torch's libraries link to libgomp by name, but the dynamic linker first resolves symbols in
    globally loaded libraries, and LLVM's runtime exports all of libgomp's. Does nothing if the
    operator has chosen a runtime (`LD_PRELOAD`) or set libgomp's variables (`GOMP_...`), or if
    torch is already imported.
    """
    runtime = _loaded[0] if _loaded else _load()
    if runtime is None:
        return False
    runtime.omp_get_max_threads()  # starts it; in a fork, on the CPUs of the first start
    # Remove its registration file, which would be left behind if this process is killed.
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
    # Small models' LM heads briefly use one more thread: keep it for the next time.
    os.environ.setdefault("KMP_HOT_TEAMS_MODE", "1")
    try:
        _loaded.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    except OSError as error:
        logger.warning("torch's own OpenMP runtime is used: %s", error)
        return None
    return _loaded[0]


def installed_library() -> Path | None:
    """Return the path of LLVM's OpenMP runtime if its package is installed."""
    try:
        files = distribution(_PACKAGE).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == _LIBRARY), None)


def configure_environment(processes: int = 1) -> None:
    """Shorten the spinning of compute threads, bound oneDNN's caches, and use huge pages.

    `processes`: number of processes that share the cores available to this one.

    Between two parallel regions of a step threads wait about 0.2 ms; spinning that long avoids a
    system call, which takes as long again in a virtual machine. LLVM's OpenMP runtime is best at
    that, but a process with one core has no threads to wait for and keeps libgomp, as measured. For
    libgomp, the default of 300,000 iterations suits only dedicated machines: if front ends, other
    engines or anything else share the CPUs, a thread that waits for a preempted one burns its whole
    time slice, and steps become many times slower.

    oneDNN compiles every operation again for each number of rows (see
    `engine.models.products.row_padding`) and keeps 1,024 of them with their buffers: over a
    gigabyte for a ten-megabyte model.

    Tensors of 2 MB and more request huge pages, which Linux grants if it can: weights are read once
    per step, and with small pages a tenth of that time is TLB misses.
    """
    has_team = num_cores() > processes
    if not (has_team and load_openmp()) and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(CACHED_PRIMITIVES))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def num_cores() -> int:
    """Return the number of cores this process can use, within its cgroup's CPU quota.

    More threads than that exhaust the quota early in each period, and then all of them stall.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    if quota is not None:
        cores = min(cores or 1, int(quota))
    return max(1, cores or 1)


def compute_processes(config: EngineConfig, engines_on_node: int) -> int:
    """Return the number of processes that compute on the CPUs available to this one."""
    if config.executor.bound_to:
        return 1
    return engines_on_node * config.parallel.processes_on_node


def bind_cpus(config: EngineConfig, rank: int = 0) -> EngineConfig:
    """Bind this process according to its settings; return the settings now in effect.

    Must run before torch is imported: its threads inherit the affinity of their creator.

    Args:
        rank: rank of this process within the engine; 0 is the leader.
    """
    lists = config.executor.bound_to
    index = Layout.of(config.parallel).index_on_node(rank)
    if index < len(lists) and bind_process(lists[index]):
        return config
    return config.changed(executor={"cpu_bind": "none"})
