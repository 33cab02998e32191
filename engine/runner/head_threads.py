"""Runs the widest product of a step with more threads than the rest of it.

Engines of small models compute with fewer threads than there are cores, because their many short
operations would wait for cores that front ends use (benchmarks/results/measurements.md). The LM
head and the draws of a large batch are the exception: they take half of a step in one piece, while
the front ends have long sent the tokens of the step before.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORTH_SHARING = 1 << 26
"""Multiplications of an LM head from which on more threads pay: about a millisecond of a core."""


@contextmanager
def head_threads(most: int, multiplications: int) -> Iterator[None]:
    """Compute what follows with up to `most` threads if its products are this large."""
    usual = torch.get_num_threads()
    if most <= usual or multiplications < _WORTH_SHARING:
        yield
        return
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
