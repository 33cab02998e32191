"""Changes to logits before the draw: bias, minimum length, penalties.

All functions work in place on float32 logits [rows, vocab] and touch only the tokens concerned.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.runner.slots import SamplingTable, SlotTable

IntArray = npt.NDArray[np.int64]


def adjusted_rows(table: SamplingTable, slots: IntArray, num_output: IntArray) -> IntArray:
    """Return the rows whose logits any function here would change."""
    short = num_output < table.min_tokens[slots]
    return np.flatnonzero(table.penalized[slots] | table.biased[slots] | short)


def adjust(
    logits: Tensor, table: SlotTable, slots: IntArray, positions: IntArray, rows: IntArray
) -> None:
    """Apply everything that the slots' parameters ask for.

    Args:
        logits: [rows, vocab] float32
        slots, positions: of each row: its slot and the position to be drawn
        rows: from `adjusted_rows`
    """
    sampling = table.sampling
    num_output = positions - table.num_prompt_tokens[slots]
    forbid_endings(
        logits, sampling, slots, rows[num_output[rows] < sampling.min_tokens[slots[rows]]]
    )
    add_bias(logits, sampling, slots, rows[sampling.biased[slots[rows]]])
    penalize(logits, table, slots, positions, rows[sampling.penalized[slots[rows]]])


def forbid_endings(logits: Tensor, table: SamplingTable, slots: IntArray, rows: IntArray) -> None:
    """Rule out the tokens that would end these rows."""
    if len(rows):
        tokens = [table.ending[slot] for slot in slots[rows]]
        index = _index(rows, tokens, logits.device)
        logits.index_put_(index, logits.new_tensor(float("-inf")))


def add_bias(logits: Tensor, table: SamplingTable, slots: IntArray, rows: IntArray) -> None:
    """Add the requested bias to single tokens."""
    if len(rows):
        pairs = [table.bias[slot] for slot in slots[rows]]
        index = _index(rows, [tokens for tokens, _ in pairs], logits.device)
        values = torch.from_numpy(np.concatenate([bias for _, bias in pairs])).to(logits.device)
        logits.index_put_(index, values, accumulate=True)


def penalize(
    logits: Tensor, table: SlotTable, slots: IntArray, positions: IntArray, rows: IntArray
) -> None:
    """Repetition penalty over prompt and output, presence and frequency over output only.

    Tokens that occur several times appear several times in the index. For the first two that is
    harmless, as the same value is written again; frequency accumulates once per occurrence.
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
