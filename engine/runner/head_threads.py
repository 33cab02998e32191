"""Runs the widest product of a step with more threads than the rest of it.

Engines of small models compute with fewer threads than there are cores, because their many short
operations would wait for cores that front ends use (benchmarks/results/measurements.md). The LM
head and the draws of a large batch are the exception: they take half of a step in one piece, while
the front ends have long sent the tokens of the step before.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.models.decoder import Decoder
from engine.models.products.row_blocks import probe_rows

_WORTH_SHARING = 1 << 26
"""Multiplications of an LM head from which on more threads pay: about a millisecond of a core."""


_PROBED_ROWS = (1, 4, 24, 64, 130)
_WHOLE_VALUES = 64
"""Values of which whole vectors have a multiple: each thread takes a part of a step's logits, and
rounds what is left over of a vector in its own way."""


@torch.inference_mode()
def keeps_bits(model: Decoder, max_threads: int) -> bool:
    """Whether float32 logits have the same bits with this many threads as with the usual number."""
    usual = torch.get_num_threads()
    if max_threads <= usual:
        return True
    if model.dtype != torch.float32 or model.spec.vocab_size % (_WHOLE_VALUES * max_threads):
        return False
    probe = probe_rows(model.spec.hidden_size, torch.float32)
    try:
        for rows in _PROBED_ROWS:
            torch.set_num_threads(usual)
            alone = model.logits(probe[:rows])
            torch.set_num_threads(max_threads)
            if not torch.equal(model.logits(probe[:rows]), alone):
                return False
    finally:
        torch.set_num_threads(usual)
    return True


@contextmanager
def head_threads(max_threads: int, multiplications: int) -> Iterator[None]:
    """Compute what follows with up to `max_threads` threads if its products are this large."""
    usual = torch.get_num_threads()
    if max_threads <= usual or multiplications < _WORTH_SHARING:
        yield
        return
    torch.set_num_threads(max_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
