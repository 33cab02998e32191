"""Draws from what filters leave of logits on a CPU, by kernels that find the few that can be left.

A row is done with without its probabilities: kernels collect its largest logits, enough of them for
its filters as a rule, and what is cut off is found among those. The rows of which too few were
collected, or too many were wanted, are drawn by torch's operators. Which way a row goes depends on
itself alone.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.kernels import candidates
from engine.models.kernels.logits import shares_of
from engine.runner.categorical import FloatArray
from engine.runner.filters import SMALLEST, Filters, IntArray, cut_among, draw_filtered

_CAPACITY = 1024
"""Most candidates of a row."""
_NUCLEUS = 256
"""Candidates that rows without top-k and min-p have at least."""
_SLACK = 1e-3
"""By how much further below the largest than min-p asks for, in units of the exponent, logits are
collected: more than rounding makes of it."""
_SIGN, _MAGNITUDE = 31, np.int32(2**31 - 1)

OrderArray = npt.NDArray[np.int32]
WeightArray = npt.NDArray[np.float32]


def draw_filtered_by_kernel(
    logits: Tensor, temperature: FloatArray, filters: Filters, uniforms: FloatArray
) -> Tensor:
    """Draw as `engine.runner.filters.draw_filtered` does."""
    logits = logits.contiguous()
    maxima = _maxima(logits)
    orders = maxima.max(axis=1)
    largest = _logits_of(orders)
    floors = _floors(maxima, largest, temperature, filters)
    found = _collect(logits, maxima, floors)
    scale = (1 / temperature).astype(np.float32)
    weights = _weights(found, largest, scale)
    needs_mass = (filters.top_k == 0) & (filters.min_p == 0)
    mass = np.cumsum(weights, axis=1, dtype=np.float64)[:, -1]
    if needs_mass.any():
        mass = np.where(needs_mass, _mass(logits, orders, scale), mass)
    with np.errstate(invalid="ignore", divide="ignore"):  # rows without numbers go torch's way
        weights = (weights / mass[:, None]).astype(np.float32)
        cut, known = cut_among(np.ascontiguousarray(np.sort(weights, axis=1)[:, ::-1]), filters)
        tokens = torch.from_numpy(_draw(found, weights, cut, uniforms))
    known &= np.isfinite(largest) & (found.counts < _CAPACITY)
    if not known.all():
        others = np.flatnonzero(~known)
        index = torch.from_numpy(others)
        tokens[index] = draw_filtered(
            logits[index], temperature[others], filters.of(others), uniforms[others]
        )
    return tokens


class _Candidates(NamedTuple):
    """The largest of each row, in the order of the vocabulary."""

    counts: IntArray
    """[rows]"""
    tokens: IntArray
    """[rows, capacity], of which each row has its count."""
    logits: WeightArray
    """[rows, capacity]"""


def _maxima(logits: Tensor) -> OrderArray:
    rows, vocab = logits.shape
    maxima = np.empty((rows, -(-vocab // candidates.CHUNK)), np.int32)
    is_wide = int(logits.dtype == torch.float32)
    candidates.find_maxima(
        shares_of(logits), logits.data_ptr(), is_wide, maxima.ctypes.data, rows, vocab
    )
    return maxima


def _floors(
    maxima: OrderArray, largest: WeightArray, temperature: FloatArray, filters: Filters
) -> OrderArray:
    """Return the orders [rows] from which on everything that filters can leave is found."""
    chunks = maxima.shape[1]
    wanted = np.where(filters.top_k > 0, filters.top_k, _NUCLEUS)
    place = np.maximum(chunks - wanted, 0)
    ordered = np.partition(maxima, np.unique(place), axis=1)
    least = _orders_of(np.full(1, np.finfo(np.float32).min, np.float32))
    floors = np.where(wanted <= chunks, ordered[np.arange(len(place)), place], least)
    by_min_p = (filters.top_k == 0) & (filters.min_p > 0)
    if by_min_p.any():
        share = np.where(by_min_p, filters.min_p, 1.0)
        lowest = largest + temperature * (np.log(share) - _SLACK)
        floors = np.where(by_min_p, _orders_of(lowest.astype(np.float32)), floors)
    return np.maximum(floors, least).astype(np.int32)


def _collect(logits: Tensor, maxima: OrderArray, floors: OrderArray) -> _Candidates:
    rows, vocab = logits.shape
    found = _Candidates(
        np.empty(rows, np.int64),
        np.empty((rows, _CAPACITY), np.int64),
        np.empty((rows, _CAPACITY), np.float32),
    )
    scratch = np.empty((rows, candidates.CHUNK), np.float32)
    candidates.collect(
        shares_of(logits),
        logits.data_ptr(),
        int(logits.dtype == torch.float32),
        rows,
        vocab,
        _CAPACITY,
        *(each.ctypes.data for each in (maxima, floors, *found, scratch)),
    )
    return found


def _weights(found: _Candidates, largest: WeightArray, scale: WeightArray) -> WeightArray:
    """Return weights [rows, most candidates + 1], of which those of a row's largest are 1."""
    width = int(found.counts.max()) + 1
    is_there = np.arange(width) < found.counts[:, None]
    logits = np.full(is_there.shape, -np.inf, np.float32)
    np.copyto(logits[:, :_CAPACITY], found.logits[:, :width], where=is_there[:, :_CAPACITY])
    with np.errstate(invalid="ignore"):
        weights: WeightArray = np.exp((logits - largest[:, None]) * scale[:, None])
    return weights


def _mass(logits: Tensor, orders: OrderArray, scale: WeightArray) -> FloatArray:
    """Return what weights, of which the largest is 1, add up to in all of the vocabulary."""
    rows, vocab = logits.shape
    mass = np.empty(rows, np.float64)
    scratch = np.empty((rows, candidates.CHUNK), np.float32)
    candidates.add_up(
        shares_of(logits),
        logits.data_ptr(),
        int(logits.dtype == torch.float32),
        rows,
        vocab,
        *(each.ctypes.data for each in (orders, scale, mass, scratch)),
    )
    return mass


def _draw(
    found: _Candidates, weights: WeightArray, cut: FloatArray, uniforms: FloatArray
) -> IntArray:
    """Draw in the order of the vocabulary, as `engine.runner.categorical` does."""
    kept = np.where(weights >= np.maximum(cut, SMALLEST)[:, None], weights, 0)
    upto = np.cumsum(kept, axis=1, dtype=np.float64)
    total = upto[:, -1:]
    above = np.count_nonzero(upto <= total * uniforms[:, None], axis=1)
    last = np.count_nonzero(upto < total, axis=1)
    tokens: IntArray = found.tokens[np.arange(len(kept)), np.minimum(above, last)]
    return tokens


def _orders_of(logits: WeightArray) -> OrderArray:
    bits = logits.view(np.int32)
    return bits ^ ((bits >> _SIGN) & _MAGNITUDE)


def _logits_of(orders: OrderArray) -> WeightArray:
    return (orders ^ ((orders >> _SIGN) & _MAGNITUDE)).view(np.float32)
