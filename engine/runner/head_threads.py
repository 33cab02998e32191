"""Runs the LM head of large batches with more threads than the other layers.

Engines of small models compute with fewer threads than there are cores, because their many short
operations would contend with the front ends (benchmarks/results/measurements.md). The LM head and
the sampling of a large batch are the exception: they take half of a step in one piece, when the
front ends have long since sent the previous step's tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.models.decoder import Decoder
from engine.models.products.row_blocks import probe_rows

_WORTH_SHARING = 1 << 26
"""Multiplications of an LM head from which more threads pay off: about 1 ms on one core."""


_PROBED_ROWS = (1, 4, 24, 64, 130)
_WHOLE_VALUES = 64
"""Multiple of the vector width in values: each thread computes a part of the logits, and the
remainder of a vector is rounded differently."""


@torch.inference_mode()
def keeps_bits(model: Decoder, max_threads: int) -> bool:
    """Return whether float32 logits are bitwise equal with this many threads and the default."""
    usual = torch.get_num_threads()
    if max_threads <= usual:
        return True
    if model.dtype != torch.float32 or model.spec.vocab_size % (_WHOLE_VALUES * max_threads):
        return False
    probe = probe_rows(model.spec.hidden_size, torch.float32)
    try:
        for rows in _PROBED_ROWS:
            torch.set_num_threads(usual)
            part = model.logits(probe[:rows])
            torch.set_num_threads(max_threads)
            if not torch.equal(model.logits(probe[:rows]), part):
                return False
    finally:
        torch.set_num_threads(usual)
    return True


@contextmanager
def head_threads(max_threads: int, multiplications: int) -> Iterator[None]:
    """Use up to `max_threads` threads inside the context if its products are large enough."""
    usual = torch.get_num_threads()
    if max_threads <= usual or multiplications < _WORTH_SHARING:
        yield
        return
    torch.set_num_threads(max_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
