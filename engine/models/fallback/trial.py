"""Compares a model's chunked, batched results with those of whole sequences.

The reference is the library's own attention ("eager"), over sequences longer than any window.
Results differ if a model keeps more state than keys and values, computes positions other than from
`position_ids`, or attends to other tokens than it has declared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.models.attention.rows import AttentionRows
from engine.models.fallback.attention import INTERFACE, CannotAttend
from engine.models.fallback.decoder import FallbackDecoder, TransformersModel
from engine.models.step import StepTokens

_ENDS = ((9, 4), (10, 5), (11, 6), (12, 7))
"""Length of each of the two sequences after each step. All steps after the first are single tokens,
so that even a state that reaches back by one token is missing in each of them."""
_WINDOW = 4
"""Window of sliding layers during the trial; shorter than both sequences at the end."""
_BLOCK_SIZE = 4
_MAX_DIFFERENCE = {torch.float32: 1e-3}
"""Maximum relative difference of a state; correct models reach 1e-6."""
_MAX_ROUNDED = 0.15
"""The same in 16 bits, where rounding can change routed experts; correct models reach 0.015."""


def trial_tokens(vocabulary: int, device: torch.device) -> Tensor:
    """Return the tokens of the first sequence."""
    return (torch.arange(_ENDS[-1][0], device=device) * 7 + 3) % vocabulary


@contextmanager
def narrow_windows(loaded: Any) -> Iterator[None]:
    """Set all sliding windows of a model shorter than the trial's sequences, temporarily."""
    owners = [loaded.config, loaded.config.get_text_config()]
    for module in loaded.modules():
        owners += [module, getattr(module, "config", module)]
    windows = [(each, getattr(each, "sliding_window", None)) for each in owners]
    narrowed = [(each, size) for each, size in windows if type(size) is int and size > _WINDOW]
    for owner, _ in narrowed:
        owner.sliding_window = _WINDOW
    try:
        yield
    finally:
        for owner, size in reversed(narrowed):
            owner.sliding_window = size


def check_parts(
    decoder: FallbackDecoder, model: TransformersModel, loaded: Any, tokens: Tensor
) -> None:
    """Compute two sequences whole with the library alone, then batched in several steps.

    Args:
        decoder: decoder over the cache, with narrow windows.
        model: the model, split in two.
        loaded: the same model; its attention is replaced temporarily.
        tokens: the longer of the sequences.

    Raises:
        CannotAttend: states of steps after the first differ from those of the whole sequences, or a
            window is longer than the sequences.
    """
    longest = max((window or 0 for window in decoder.spec.windows), default=0)
    if longest > _WINDOW:
        raise CannotAttend(f"its window of {longest} tokens is longer than the test sequences")
    sequences = [tokens, tokens.flip(0)[: _ENDS[-1][1]]]
    loaded.set_attn_implementation("eager")
    try:
        whole = [model.states(sequence, None) for sequence in sequences]
    finally:
        loaded.set_attn_implementation(INTERFACE)
    blocks = -(-len(tokens) // _BLOCK_SIZE)
    kv = decoder.kv_format
    shape = (2 * blocks, _BLOCK_SIZE, *kv.row(decoder.spec.kv_shape))
    cache = [
        torch.zeros(shape, dtype=kv.stored, device=decoder.device)
        for _ in range(decoder.spec.num_layers)
    ]
    decoder(_step(decoder, sequences, (0, 0), _ENDS[0], blocks), cache)
    found, expected = [], []
    for starts, ends in pairwise(_ENDS):
        found.append(decoder(_step(decoder, sequences, starts, ends, blocks), cache))
        expected += [states[start] for states, start in zip(whole, starts, strict=True)]
    states, reference = torch.cat(found).float(), torch.stack(expected).float()
    difference = (states - reference).norm(dim=1) / reference.norm(dim=1).clamp(min=1e-6)
    if not float(difference.median()) < _MAX_DIFFERENCE.get(decoder.dtype, _MAX_ROUNDED):
        raise CannotAttend("its results in chunks and batches differ from those of whole sequences")


def _step(
    decoder: FallbackDecoder,
    sequences: list[Tensor],
    starts: tuple[int, ...],
    ends: tuple[int, ...],
    blocks: int,
) -> StepTokens:
    """Return a step with a row per sequence; their blocks are consecutive."""
    device = sequences[0].device
    counts = np.subtract(ends, starts)
    tables = np.arange(len(sequences) * blocks, dtype=np.int32).reshape(-1, blocks)
    rows = AttentionRows(
        starts=np.array(starts),
        counts=counts,
        first_token=np.cumsum(counts) - counts,
        block_tables=tables,
        block_size=_BLOCK_SIZE,
    )
    parts = [torch.arange(*each, device=device) for each in zip(starts, ends, strict=True)]
    return StepTokens(
        token_ids=torch.cat([s[part] for s, part in zip(sequences, parts, strict=True)]),
        positions=torch.cat(parts),
        slots=torch.cat([part + i * blocks * _BLOCK_SIZE for i, part in enumerate(parts)]),
        rows=rows,
        plans={window: decoder.attention.plan(rows, window) for window in decoder.windows[0]},
    )
