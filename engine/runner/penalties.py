"""Adjustments of logits before sampling: bias, minimum length, penalties, forbidden tokens.

All functions work in place on float32 logits [rows, vocab] and touch only the affected tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.grammar.masks import WORD_BITS, TokenMasks
from engine.runner.slots import IntArray, SamplingTable, SlotTable


def adjusted_rows(table: SamplingTable, slots: IntArray, num_output: IntArray) -> IntArray:
    """Return the rows whose logits any function here would change."""
    short = num_output < table.min_tokens[slots]
    limited = table.restricted[slots] | table.has_bad_words[slots]
    return np.flatnonzero(table.penalized[slots] | table.biased[slots] | limited | short)


def adjust(
    logits: Tensor,
    table: SlotTable,
    slots: IntArray,
    positions: IntArray,
    rows: IntArray,
    masks: TokenMasks | None = None,
) -> None:
    """Apply all adjustments of the slots' parameters.

    Args:
        logits: [rows, vocab] float32
        slots, positions: slot of each row, and the position to sample
        rows: from `adjusted_rows`
        masks: allowed tokens of rows with a grammar; rows that allow only end tokens can end early
    """
    sampling = table.sampling
    num_output = positions - table.num_prompt_tokens[slots]
    short = rows[num_output[rows] < sampling.min_tokens[slots[rows]]]
    if masks is not None and len(short):
        ends = [masks.allows_only(row, sampling.ending[slots[row]]) for row in short]
        short = short[~np.array(ends)]
    forbid_endings(logits, sampling, slots, short)
    add_bias(logits, sampling, slots, rows[sampling.biased[slots[rows]]])
    penalize(logits, table, slots, positions, rows[sampling.penalized[slots[rows]]])
    forbid_bad_words(logits, table, slots, positions, rows[sampling.has_bad_words[slots[rows]]])
    allow_only(logits, sampling, slots, rows[sampling.restricted[slots[rows]]])


def forbid_endings(logits: Tensor, table: SamplingTable, slots: IntArray, rows: IntArray) -> None:
    """Mask the tokens that would end these rows."""
    if len(rows):
        tokens = [table.ending[slot] for slot in slots[rows]]
        index = _index(rows, tokens, logits.device)
        logits.index_put_(index, logits.new_tensor(float("-inf")))


def forbid_others(logits: Tensor, masks: TokenMasks) -> None:
    """Mask the tokens that the rows' grammars do not allow."""
    for row, token_id in masks.endings.items() if masks.eos_token_ids else ():
        maximum = logits[row, list(masks.eos_token_ids)].max()
        logits[row, token_id] = torch.maximum(logits[row, token_id], maximum)
    if logits.device.type == "cpu":
        _forbid_on_cpu(logits.numpy(), masks)
    else:
        forbid_on_device(logits, masks)


def forbid_on_device(logits: Tensor, masks: TokenMasks) -> None:
    """Like `forbid_others`, unpacking the masks on the logits' device."""
    bits = torch.from_numpy(masks.bits).to(logits.device)
    bit = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = (bits.unsqueeze(-1) >> bit).bitwise_and_(1).view(len(bits), -1)
    forbidden = ~allowed[:, : logits.shape[1]].bool()
    rows = torch.from_numpy(masks.rows).to(logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))


def _forbid_on_cpu(logits: npt.NDArray[np.float32], masks: TokenMasks) -> None:
    """Clamp each logit to plus or minus infinity, looked up for eight tokens at a time.

    The time does not depend on the masks, unlike that of conditional fills, which are many times
    slower when the condition is hard to predict.
    """
    most = np.empty((masks.bits.shape[1] * masks.bits.itemsize, 8), np.float32)
    for row, octets in zip(masks.rows.tolist(), masks.bits.view(np.uint8), strict=True):
        np.take(_MAX, octets, axis=0, out=most, mode="clip")
        np.minimum(logits[row], most.reshape(-1)[: logits.shape[1]], out=logits[row])


_MAX = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)
"""[256, 8] upper bound of each logit, by mask byte."""


def forbid_bad_words(
    logits: Tensor, table: SlotTable, slots: IntArray, positions: IntArray, rows: IntArray
) -> None:
    """Mask the tokens that would complete a bad word."""
    if not len(rows):
        return
    tokens = []
    for slot, end in zip(slots[rows].tolist(), positions[rows].tolist(), strict=True):
        output = table.token_ids[slot, table.num_prompt_tokens[slot] : end]
        tokens.append(table.sampling.bad_words[slot].completing(output))
    index = _index(rows, tokens, logits.device)
    logits.index_put_(index, logits.new_tensor(float("-inf")))


def allow_only(logits: Tensor, table: SamplingTable, slots: IntArray, rows: IntArray) -> None:
    """Mask all tokens but the allowed ones of these rows.

    If other adjustments mask all of a row's allowed tokens, they are all allowed again.
    """
    if not len(rows):
        return
    allowed = [table.allowed[slot] for slot in slots[rows]]
    index = _index(rows, allowed, logits.device)
    values = logits[index]
    possible = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    possible.index_add_(0, index[0], (~values.isneginf()).to(torch.int32))
    values = torch.where(possible[index[0]] > 0, values, torch.zeros_like(values))
    logits[torch.from_numpy(rows).to(logits.device)] = float("-inf")
    logits.index_put_(index, values)


def add_bias(logits: Tensor, table: SamplingTable, slots: IntArray, rows: IntArray) -> None:
    """Add the requested bias to individual tokens."""
    if len(rows):
        pairs = [table.bias[slot] for slot in slots[rows]]
        index = _index(rows, [tokens for tokens, _ in pairs], logits.device)
        values = torch.from_numpy(np.concatenate([bias for _, bias in pairs])).to(logits.device)
        logits.index_put_(index, values, accumulate=True)


def penalize(
    logits: Tensor, table: SlotTable, slots: IntArray, positions: IntArray, rows: IntArray
) -> None:
    """Apply the repetition penalty over prompt and output, presence and frequency over output only.

    Repeated tokens appear repeatedly in the index. For the first two that is harmless, as the same
    value is written again; frequency accumulates once per occurrence.
    """
    if not len(rows):
        return
    sampling, device = table.sampling, logits.device
    histories = [table.token_ids[slots[row], : positions[row]] for row in rows]
    index = _index(rows, histories, device)
    owner = slots[np.repeat(rows, [len(tokens) for tokens in histories])]
    seen = logits[index]
    factor = _values(sampling.repetition_penalty[owner], device)
    logits.index_put_(index, torch.where(seen > 0, seen / factor, seen * factor))

    outputs = [
        table.token_ids[slots[r], table.num_prompt_tokens[slots[r]] : positions[r]] for r in rows
    ]
    index = _index(rows, outputs, device)
    owner = slots[np.repeat(rows, [len(tokens) for tokens in outputs])]
    presence = _values(sampling.presence_penalty[owner], device)
    logits.index_put_(index, logits[index] - presence)
    frequency = _values(sampling.frequency_penalty[owner], device)
    logits.index_put_(index, -frequency, accumulate=True)


def _index(
    rows: IntArray, tokens: Sequence[npt.NDArray[np.integer]], device: torch.device
) -> tuple[Tensor, Tensor]:
    repeated = np.repeat(rows, [len(ids) for ids in tokens])
    columns = np.concatenate(tokens).astype(np.int64)
    return torch.from_numpy(repeated).to(device), torch.from_numpy(columns).to(device)


def _values(values: npt.NDArray[np.float64], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)
