"""Top-k, top-p and min-p filters, and sampling from the remaining tokens.

Every operation treats rows independently, as in `engine.runner.categorical`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runner.categorical import (
    DrawFromLogits,
    draw_from_logits,
    draw_from_weights,
)
from engine.runner.slots import FloatArray, IntArray

_CANDIDATES = (256, 4096)
"""Numbers of largest probabilities to try before sorting a whole row."""
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
_SMALLEST = float(np.finfo(np.float32).tiny)


class Filters(NamedTuple):
    """Filter parameters, each an array [rows].

    Min-p keeps tokens of at least that share of the largest probability, then top-k the k largest
    (0: all), then top-p the fewest whose total reaches that share of the remaining probability.
    """

    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray

    def of(self, rows: IntArray) -> "Filters":
        """Return those of some rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


DrawFiltered = Callable[[Tensor, FloatArray, Filters, FloatArray], Tensor]
"""Signature of `draw_filtered`."""


def draw_filtered(
    logits: Tensor, temperature: FloatArray, filters: Filters, uniforms: FloatArray
) -> Tensor:
    """Sample from softmax(logits / temperature) after filtering.

    Args:
        logits: [rows, vocab], of which some may be -inf
        temperature: [rows] above 0
        filters: [rows] of each
        uniforms: [rows] in [0, 1)

    Returns:
        [rows] token ids
    """
    weights = _probabilities(logits, temperature)
    cut = cutoff(weights, filters)
    # A threshold at one is a single pass without a mask, and x / x is exactly one. The row's
    # remaining scale does not affect sampling.
    weights /= _column(np.maximum(cut, _SMALLEST), weights)
    weights = F.threshold(weights, _BELOW_ONE, 0.0, inplace=True)
    return draw_from_weights(weights, uniforms)


def _probabilities(logits: Tensor, temperature: FloatArray) -> Tensor:
    """Return new float32 probabilities [rows, vocab]."""
    if bool((temperature == 1.0).all()):
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scaled = logits.to(torch.float32, copy=True)
    scaled /= _column(temperature, logits)
    return torch.softmax(scaled, dim=-1, out=scaled)


def cutoff(probabilities: Tensor, filters: Filters) -> FloatArray:
    """Return each row's smallest kept probability; all tokens that equal it are kept."""
    rows, vocab = probabilities.shape
    cut = np.zeros(rows)
    pending = np.arange(rows)
    for candidates in (*_CANDIDATES, vocab):
        count = min(vocab, max(candidates, int(filters.top_k[pending].max())))
        if len(pending) < rows:
            index = torch.from_numpy(pending).to(probabilities.device)
            largest = _descending(probabilities.index_select(0, index), count)
        else:
            largest = _descending(probabilities, count)
        cut[pending], known = _cut_among(largest, filters.of(pending), whole=count == vocab)
        pending = pending[~known]
        if not len(pending):
            break
    return cut


def _cut_among(
    largest: npt.NDArray[np.float32], filters: Filters, *, whole: bool
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Find the cutoff among the largest probabilities, and whether they suffice to determine it.

    Args:
        largest: [rows, count], descending
        filters: [rows] of each
        whole: whether these are all probabilities
    """
    top_k, top_p, min_p = filters
    rows, count = largest.shape
    each = np.arange(rows)
    limit = np.where(top_k > 0, np.minimum(top_k, count), count)
    base = np.where(top_k > 0, largest[each, limit - 1], 0.0)
    base = np.maximum(base, largest[:, 0] * min_p)
    has_base = base > 0
    kept = np.where(has_base, np.count_nonzero(largest >= base[:, None], axis=1), count)
    upto = np.cumsum(largest, axis=1, dtype=np.float64)
    total = np.where(has_base, upto[each, kept - 1], 1.0)
    inside = np.count_nonzero(upto < (top_p * total)[:, None], axis=1)
    is_nucleus = top_p < 1.0
    smallest = largest[each, np.minimum(inside, kept - 1)]
    cut = np.where(is_nucleus, np.maximum(base, smallest), base)
    # Unknown if tokens beyond these belong to the total, or to the nucleus itself.
    known = ~is_nucleus | whole | np.where(has_base, kept < count, inside < count)
    return cut, known


def _descending(values: Tensor, count: int) -> npt.NDArray[np.float32]:
    """Return the `count` largest values of each row, descending.

    On a CPU numpy's vectorized partition and sort are several times faster than torch's.
    """
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values.cpu().numpy()
    array: npt.NDArray[np.float32] = values.numpy()
    if count < array.shape[1]:
        array = np.partition(array, array.shape[1] - count, axis=1)[:, -count:]
    return np.ascontiguousarray(np.sort(array, axis=1)[:, ::-1])


def _column(values: FloatArray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(like.device).unsqueeze(1)


class Drawing(NamedTuple):
    """Functions that sample a token per row; all treat rows independently."""

    unfiltered: DrawFromLogits
    filtered: DrawFiltered


WITH_TORCH = Drawing(draw_from_logits, draw_filtered)
"""Implementation with torch's operators, for any device."""
