"""Samples tokens from logits, for all rows of a batch at once.

Sampling uses one uniform number per row, which is a function of (seed, position) alone. Every
operation treats rows independently, so a row's token does not depend on its neighbours or on its
index in the batch.
"""

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.grammar.masks import TokenMasks
from engine.runner.categorical import uniform
from engine.runner.filters import WITH_TORCH, Drawing, Filters
from engine.runner.logprobs import token_logprobs
from engine.runner.penalties import adjust, adjusted_rows, forbid_others
from engine.runner.slots import NO_LOGPROBS, IntArray, SamplingTable, SlotTable
from engine.shared.messages import TokenLogprob

_COLDEST = 1e-6
"""Minimum temperature, at which the most likely token is practically certain."""


class Sampled(msgspec.Struct, frozen=True):
    """Tokens in row order, and the requested log probabilities."""

    token_ids: IntArray
    logprobs: list[TokenLogprob | None] | None


def sample(
    logits: Tensor,
    table: SlotTable,
    slots: IntArray,
    positions: IntArray,
    masks: TokenMasks | None = None,
    *,
    drawing: Drawing = WITH_TORCH,
) -> Sampled:
    """Sample one token per row.

    Args:
        logits: [rows, vocab]; overwritten
        slots: [rows] whose parameters apply
        positions: [rows] position of the token to sample in its sequence
        masks: allowed tokens of rows with a grammar
        drawing: sampling functions for the dtype and device of the logits
    """
    params = table.sampling
    if masks is None and bool(params.plain_greedy[slots].all()):
        return Sampled(most_likely(logits), None)
    adjusted = _adjusted(logits, table, slots, positions, masks)
    reported = np.flatnonzero(params.logprobs[slots] != NO_LOGPROBS)
    if adjusted is logits and len(reported):
        adjusted = logits.clone()
    token_ids = _choose(adjusted, params, slots, positions, drawing)
    return Sampled(token_ids, _logprobs(logits, params, slots, token_ids, reported))


def draft(
    logits: Tensor,
    table: SlotTable,
    slots: IntArray,
    positions: IntArray,
    *,
    drawing: Drawing = WITH_TORCH,
) -> IntArray:
    """Sample one token per row as `sample` does, without grammars and log probabilities.

    It uses the same number from (seed, position) as the sample that it predicts, so it yields the
    same token as far as the distributions agree. The arguments are those of `sample`.
    """
    if bool(table.sampling.plain_greedy[slots].all()):
        return most_likely(logits)
    adjusted = _adjusted(logits, table, slots, positions, None)
    return _choose(adjusted, table.sampling, slots, positions, drawing)


def _adjusted(
    logits: Tensor,
    table: SlotTable,
    slots: IntArray,
    positions: IntArray,
    masks: TokenMasks | None,
) -> Tensor:
    """Return the logits adjusted by parameters and grammars; a copy if anything changes."""
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
    """Return the id of each row's largest logit, the lowest of equals.

    On a CPU numpy's argmax is many times faster than torch's. It does not support torch's 16-bit
    floats, but the bits of positive floats order like integers, above those of all negative ones.
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
    drawing: Drawing,
) -> IntArray:
    """Sample each row with the cheapest method that its parameters allow."""
    drawn, filtered = params.temperature[slots] > 0, params.filtered[slots]
    token_ids = np.empty(len(slots), np.int64)
    for members, filters in ((~drawn, None), (drawn & ~filtered, False), (drawn & filtered, True)):
        rows = np.flatnonzero(members)
        if not len(rows):
            continue
        some, some_slots, some_positions = logits, slots, positions
        if len(rows) < len(slots):
            some = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
            some_slots, some_positions = slots[rows], positions[rows]
        if filters is None:
            token_ids[rows] = most_likely(some)
            continue
        temperature = np.maximum(params.temperature[some_slots], _COLDEST)
        uniforms = uniform(params.seed[some_slots], some_positions)
        if filters:
            remaining = Filters(
                params.top_k[some_slots], params.top_p[some_slots], params.min_p[some_slots]
            )
            found = drawing.filtered(some, temperature, remaining, uniforms)
        else:
            found = drawing.unfiltered(some, temperature, uniforms, consume=True)
        token_ids[rows] = _on_host(found)
    return token_ids


def _logprobs(
    logits: Tensor, params: SamplingTable, slots: IntArray, token_ids: IntArray, rows: IntArray
) -> list[TokenLogprob | None] | None:
    """Return log probabilities for the rows that request them."""
    if not len(rows):
        return None
    index = torch.from_numpy(rows).to(logits.device)
    num_logprobs = params.logprobs[slots[rows]]
    named = [params.named[slot] for slot in slots[rows].tolist()]
    entries = token_logprobs(logits.index_select(0, index), token_ids[rows], num_logprobs, named)
    result: list[TokenLogprob | None] = [None] * len(slots)
    for row, entry in zip(rows.tolist(), entries, strict=True):
        result[row] = entry
    return result


def _on_host(token_ids: Tensor) -> IntArray:
    result: IntArray = token_ids.cpu().numpy()
    return result
