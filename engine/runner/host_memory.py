"""Tuning of the process's memory allocator, and lazily committed buffers."""

import ctypes
import gc
import logging
import mmap

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_KEPT_BYTES = 256 * 2**20
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Make the C library retain up to 256 MiB of freed memory for later allocations.

    By default glibc returns large buffers to the system immediately, and every step pays again for
    the page faults of its activations: with sampling over a large vocabulary these take longer than
    the computation. Afterwards large buffers come from the heap too, so call this after whatever
    relies on fresh zero pages. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES)):
        if mallopt(option, value) != 1:
            logger.warning("mallopt(%d, %d) was refused", option, value)


def release_freed_memory(device: torch.device) -> None:
    """Return all freed memory to the system, on host and device, including retained memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU whose pages become resident on first use."""
    size = int(np.prod(shape)) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
