"""From logits to tokens, for all rows of a batch at once.

A draw takes one uniform number per row, which is a function of (seed, position) alone. Every
operation treats rows independently, so a row's token does not depend on its neighbours or on its
place in the batch.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.grammar.masks import TokenMasks
from engine.runner.categorical import DrawFromLogits, draw_from_logits, draw_from_weights
from engine.runner.draws import uniform
from engine.runner.logprobs import token_logprobs
from engine.runner.penalties import adjust, adjusted_rows, forbid_others
from engine.runner.slots import NO_LOGPROBS, FloatArray, SamplingTable, SlotTable
from engine.shared.messages import TokenLogprob

IntArray = npt.NDArray[np.int64]
_Way = Callable[[Tensor, SamplingTable, IntArray, IntArray], IntArray]
"""How some rows are drawn, from logits that may be overwritten."""

_CANDIDATES = (256, 4096)
"""How many of the largest probabilities are tried before a whole row is sorted."""
_COLDEST = 1e-6
"""Lower temperatures are raised to this, at which the most likely token is certain anyway."""
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
_SMALLEST = float(np.finfo(np.float32).tiny)


class Sampled(msgspec.Struct, frozen=True):
    """Tokens in row order, and the log probabilities that were asked for."""

    token_ids: IntArray
    logprobs: list[TokenLogprob | None] | None


def sample(
    logits: Tensor,
    table: SlotTable,
    slots: IntArray,
    positions: IntArray,
    masks: TokenMasks | None = None,
    *,
    draw: DrawFromLogits = draw_from_logits,
) -> Sampled:
    """Draw one token per row.

    Args:
        logits: [rows, vocab]; overwritten
        slots: [rows] whose parameters apply
        positions: [rows] position in its sequence of the token to draw
        masks: the tokens that rows with a grammar may draw
        draw: draws where nothing is filtered
    """
    params = table.sampling
    if masks is None and bool(params.plain_greedy[slots].all()):
        return Sampled(most_likely(logits), None)
    adjusted = _adjusted(logits, table, slots, positions, masks)
    reported = np.flatnonzero(params.logprobs[slots] != NO_LOGPROBS)
    if adjusted is logits and len(reported):
        adjusted = logits.clone()
    token_ids = _choose(adjusted, params, slots, positions, draw)
    return Sampled(token_ids, _logprobs(logits, params, slots, token_ids, reported))


def draft(
    logits: Tensor,
    table: SlotTable,
    slots: IntArray,
    positions: IntArray,
    *,
    draw: DrawFromLogits = draw_from_logits,
) -> IntArray:
    """Draw one token per row as `sample` does, without grammars, and report nothing of it.

    With the same number from (seed, position) as the draw that it predicts, it comes to the same
    token as far as the distributions are alike. The arguments are those of `sample`.
    """
    if bool(table.sampling.plain_greedy[slots].all()):
        return most_likely(logits)
    adjusted = _adjusted(logits, table, slots, positions, None)
    return _choose(adjusted, table.sampling, slots, positions, draw)


def _adjusted(
    logits: Tensor,
    table: SlotTable,
    slots: IntArray,
    positions: IntArray,
    masks: TokenMasks | None,
) -> Tensor:
    """Return the logits with all changes that parameters and grammars ask for; a copy if any."""
    num_output = positions - table.num_prompt_tokens[slots]
    rows = adjusted_rows(table.sampling, slots, num_output)
    if not len(rows) and masks is None:
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    if len(rows):
        adjust(adjusted, table, slots, positions, rows, masks)
    if masks is not None:
        forbid_others(adjusted, masks)
    return adjusted


def most_likely(logits: Tensor) -> IntArray:
    """Return the id of the largest logit of each row, the lowest of equals.

    On a CPU numpy's search is many times faster than torch's. It knows no 16-bit float of torch,
    but the bits of positive floats order like integers, above those of all negative ones.
    """
    if logits.device.type != "cpu":
        return _on_host(logits.argmax(dim=-1))
    if logits.dtype.itemsize == 2:
        bits = logits.view(torch.int16).numpy()
        ids: IntArray = bits.argmax(axis=-1)
        if bool((bits[np.arange(len(ids)), ids] > 0).all()):
            return ids
    ids = logits.float().numpy().argmax(axis=-1)
    return ids


def _choose(
    logits: Tensor,
    params: SamplingTable,
    slots: IntArray,
    positions: IntArray,
    draw: DrawFromLogits,
) -> IntArray:
    """Draw each row in the cheapest way that its parameters allow."""
    drawn, filtered = params.temperature[slots] > 0, params.filtered[slots]
    ways: tuple[tuple[npt.NDArray[np.bool_], _Way], ...] = (
        (~drawn, lambda some, *_: most_likely(some)),
        (drawn & ~filtered, partial(_draw, draw)),
        (drawn & filtered, _draw_filtered),
    )
    token_ids = np.empty(len(slots), np.int64)
    for members, choose in ways:
        rows = np.flatnonzero(members)
        if len(rows) == len(slots):
            return choose(logits, params, slots, positions)
        if len(rows):
            some = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
            token_ids[rows] = choose(some, params, slots[rows], positions[rows])
    return token_ids


def _draw(
    draw: DrawFromLogits,
    logits: Tensor,
    params: SamplingTable,
    slots: IntArray,
    positions: IntArray,
) -> IntArray:
    uniforms = uniform(params.seed[slots], positions)
    return _on_host(draw(logits, _temperature(params, slots), uniforms, consume=True))


def _draw_filtered(
    logits: Tensor, params: SamplingTable, slots: IntArray, positions: IntArray
) -> IntArray:
    weights = _probabilities(logits, _temperature(params, slots))
    cut = smallest_kept(weights, params.top_k[slots], params.top_p[slots], params.min_p[slots])
    # A threshold at one is a single pass without a mask, and x / x is exactly one. The scale
    # that is left on the row does not matter to the draw.
    weights /= _column(np.maximum(cut, _SMALLEST), weights)
    weights = F.threshold(weights, _BELOW_ONE, 0.0, inplace=True)
    return _on_host(draw_from_weights(weights, uniform(params.seed[slots], positions)))


def _probabilities(logits: Tensor, temperature: FloatArray) -> Tensor:
    """Return new float32 probabilities [rows, vocab]."""
    if bool((temperature == 1.0).all()):
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scaled = logits.to(torch.float32, copy=True)
    scaled /= _column(temperature, logits)
    return torch.softmax(scaled, dim=-1, out=scaled)


def _temperature(params: SamplingTable, slots: IntArray) -> FloatArray:
    return np.maximum(params.temperature[slots], _COLDEST)


def smallest_kept(
    probabilities: Tensor, top_k: IntArray, top_p: FloatArray, min_p: FloatArray
) -> FloatArray:
    """Return each row's smallest probability that the filters keep; equal ones are all kept.

    Min-p keeps tokens of at least that share of the largest probability, then top-k the k
    largest (0: all), then top-p the fewest that together have that share of what is left.
    """
    rows, vocab = probabilities.shape
    cut = np.zeros(rows)
    pending = np.arange(rows)
    for candidates in (*_CANDIDATES, vocab):
        count = min(vocab, max(candidates, int(top_k[pending].max())))
        if len(pending) < rows:
            index = torch.from_numpy(pending).to(probabilities.device)
            largest = _descending(probabilities.index_select(0, index), count)
        else:
            largest = _descending(probabilities, count)
        cut[pending], known = _cut(
            largest, top_k[pending], top_p[pending], min_p[pending], whole=count == vocab
        )
        pending = pending[~known]
        if not len(pending):
            break
    return cut


def _cut(
    largest: npt.NDArray[np.float32],
    top_k: IntArray,
    top_p: FloatArray,
    min_p: FloatArray,
    *,
    whole: bool,
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Find the cut among the largest probabilities, and whether they are enough to know it."""
    rows, count = largest.shape
    limit = np.where(top_k > 0, np.minimum(top_k, count), count)
    base = np.where(top_k > 0, largest[np.arange(rows), limit - 1], 0.0)
    base = np.maximum(base, largest[:, 0] * min_p)
    cut, known = base.copy(), np.ones(rows, np.bool_)
    nucleus = np.flatnonzero(top_p < 1.0)
    mass = torch.from_numpy(largest[nucleus]).cumsum(dim=1, dtype=torch.float64).numpy()
    for row, upto in zip(nucleus.tolist(), mass, strict=True):
        kept, total = count, 1.0
        if base[row] > 0:
            kept = int(np.count_nonzero(largest[row] >= base[row]))
            total = upto[kept - 1]
        inside = int(np.searchsorted(upto, top_p[row] * total))
        cut[row] = max(base[row], largest[row, min(inside, kept - 1)])
        # Not known if tokens beyond these belong to the total, or to the nucleus itself.
        known[row] = whole or (kept < count if base[row] > 0 else inside < count)
    return cut, known


def _descending(values: Tensor, count: int) -> npt.NDArray[np.float32]:
    """Return the `count` largest values of each row, largest first.

    On a CPU numpy's vectorized partition and sort are several times faster than torch's.
    """
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values.cpu().numpy()
    array: npt.NDArray[np.float32] = values.numpy()
    if count < array.shape[1]:
        array = np.partition(array, array.shape[1] - count, axis=1)[:, -count:]
    return np.ascontiguousarray(np.sort(array, axis=1)[:, ::-1])


def _logprobs(
    logits: Tensor, params: SamplingTable, slots: IntArray, token_ids: IntArray, rows: IntArray
) -> list[TokenLogprob | None] | None:
    """Report the rows that asked for it."""
    if not len(rows):
        return None
    index = torch.from_numpy(rows).to(logits.device)
    wanted = params.logprobs[slots[rows]]
    named = [params.named[slot] for slot in slots[rows].tolist()]
    entries = token_logprobs(logits.index_select(0, index), token_ids[rows], wanted, named)
    result: list[TokenLogprob | None] = [None] * len(slots)
    for row, entry in zip(rows.tolist(), entries, strict=True):
        result[row] = entry
    return result


def _column(values: FloatArray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(like.device).unsqueeze(1)


def _on_host(token_ids: Tensor) -> IntArray:
    result: IntArray = token_ids.cpu().numpy()
    return result
