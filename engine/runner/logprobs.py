"""Log probabilities of chosen tokens and their alternatives, from raw logits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.runner.slots import IntArray
from engine.shared.messages import TokenLogprob

_CACHED_VALUES = 1 << 20
"""Maximum logits that a CPU processes at once; more would exceed its caches, and be allocated
from the system each time."""


def token_logprobs(
    logits: Tensor, chosen: IntArray, alternatives: IntArray, named: Sequence[IntArray] = ()
) -> list[TokenLogprob]:
    """Return one entry per row.

    Args:
        logits: [rows, vocab] as computed by the model, of any floating-point dtype
        chosen: [rows] the token to report
        alternatives: [rows] number of most likely tokens to list
        named: [rows] tokens to list instead, in this order, for rows that have any

    Equally likely tokens are listed by id, lowest first.
    """
    on_cpu = logits.device.type == "cpu"
    at_once = max(1, _CACHED_VALUES // logits.shape[1] if on_cpu else len(logits))
    parts = (slice(first, first + at_once) for first in range(0, len(logits), at_once))
    return [
        entry
        for part in parts
        for entry in _of_rows(logits[part], chosen[part], alternatives[part], named[part])
    ]


def _of_rows(
    logits: Tensor, chosen: IntArray, alternatives: IntArray, named: Sequence[IntArray]
) -> list[TokenLogprob]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen_logprobs = logprobs.gather(1, torch.from_numpy(chosen).to(logits.device).unsqueeze(1))
    ranks = ((logprobs > chosen_logprobs).sum(dim=-1) + 1).tolist()
    listed = _listed(logprobs, alternatives, named)
    return [
        TokenLogprob(logprob=logprob, rank=rank, top_ids=ids, top_logprobs=values)
        for logprob, rank, (ids, values) in zip(
            chosen_logprobs[:, 0].tolist(), ranks, listed, strict=True
        )
    ]


def _listed(
    logprobs: Tensor, counts: IntArray, named: Sequence[IntArray]
) -> list[tuple[list[int], list[float]]]:
    """Return the ids and values of each row's alternatives."""
    sizes = np.array([len(ids) for ids in named], np.int64)
    if not sizes.any():
        return _top(logprobs, counts)
    listed = _top(logprobs, np.where(sizes, 0, counts))
    rows = np.repeat(np.arange(len(sizes)), sizes)
    index = torch.from_numpy(np.stack([rows, np.concatenate(named)])).to(logprobs.device)
    values = np.split(logprobs[index[0], index[1]].cpu().numpy(), np.cumsum(sizes)[:-1])
    for row in np.flatnonzero(sizes).tolist():
        listed[row] = named[row].tolist(), values[row].tolist()
    return listed


def _top(logprobs: Tensor, counts: IntArray) -> list[tuple[list[int], list[float]]]:
    """Return the ids and values of each row's largest entries, ties by id.

    `topk` breaks ties arbitrarily, so it is used only to find the smallest listed value.
    """
    count = min(int(counts.max()), logprobs.shape[1])
    if count == 0:
        return [([], [])] * len(counts)
    smallest = logprobs.topk(count, dim=-1).values[:, -1:]
    found = (logprobs >= smallest).nonzero()  # sorted by row, then id
    values = logprobs[found[:, 0], found[:, 1]].cpu().numpy()
    rows, ids = found.cpu().numpy().T
    order = np.lexsort((ids, -values, rows))
    first = np.searchsorted(rows, np.arange(len(counts)))
    picked = [order[at : at + n] for at, n in zip(first, np.minimum(counts, count), strict=True)]
    return [(ids[row].tolist(), values[row].tolist()) for row in picked]
