"""Environment variables of torch's libraries, which have to be set before torch is imported.

What the environment says already is left alone.
"""

import os

from engine.executor.openmp import load_openmp
from engine.shared.cpu.machine import cpu_quota

SPIN_COUNT = 10_000
"""Iterations of libgomp's wait loop, of about 0.05 us each: some 0.5 ms, as with LLVM's runtime."""

CACHED_PRIMITIVES = 256
"""Compiled oneDNN operations kept, in each of its two caches; a model's step uses about ten."""


def settle_environment(processes: int = 1) -> None:
    """Have compute threads sleep soon, bound what oneDNN keeps, and use huge pages.

    `processes`: how many share the cores that this one may use.

    Between two parallel regions of a step threads wait for some 0.2 ms, so a spin of that length
    spares them the way through the kernel, which in a virtual machine takes as long again. LLVM's
    OpenMP runtime is best at that (`engine.executor.openmp`), but a process with one core has
    nobody to wait for and keeps libgomp, as it was measured. Where libgomp has to serve, its
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
