"""The tasks of a step's attention, and how threads share them."""

from typing import Any

import msgspec
import numpy as np
import torch

from engine.models.attention.rows import IntArray


class SharedTasks(msgspec.Struct, frozen=True):
    """The tasks of a step, as a kernel takes them."""

    shares: int
    addresses: tuple[int, ...]
    """Of what `held` holds, in the order of the kernel's arguments, as the sizes."""
    sizes: tuple[int, ...]
    held: tuple[Any, ...]


def shares_of(work: IntArray, min_work: int) -> IntArray:
    """Return the first task of each thread's share, and the end, so that work is about even.

    Args:
        work: of each task.
        min_work: total from which on threads share it.
    """
    total = np.cumsum(work)
    threads = min(torch.get_num_threads(), len(total))
    if int(total[-1]) < min_work:
        threads = 1
    bounds = total[-1] * np.arange(1, threads) / threads
    inner = np.searchsorted(total, bounds, side="left") + 1
    return np.concatenate(([0], np.minimum(inner, len(total)), [len(total)]))
