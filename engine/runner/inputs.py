"""From a batch plan to the arrays that the model takes."""

import msgspec
import numpy as np
import numpy.typing as npt

from engine.batch.batch import BatchPlan
from engine.models.attention.rows import AttentionRows
from engine.runner.slots import SlotTable

IntArray = npt.NDArray[np.int64]


class BatchRows(msgspec.Struct, frozen=True):
    """The rows of a plan and their tokens, one row after the other."""

    slots: IntArray
    starts: IntArray
    counts: IntArray
    first_token: IntArray
    """Index of each row's first token."""
    samples: IntArray
    """The rows that draw a token."""
    proposing: IntArray
    """The rows with draft tokens."""
    token_ids: IntArray
    positions: IntArray
    """Of each token in its sequence."""
    turns: IntArray
    """The same, or what queries and keys are turned by in its place, [tokens] or [3, tokens]: see
    `StepTokens.positions`."""
    adapters: IntArray
    """Slot of each token's adapter; -1 for none."""
    cache_slots: IntArray
    """Flat place of each token in a layer's cache, for layers of the first group."""
    other_slots: tuple[IntArray, ...] = ()
    """The same for the other groups."""

    @property
    def last_tokens(self) -> IntArray:
        """Index of each row's last token."""
        return self.first_token + self.counts - 1

    @property
    def next_positions(self) -> IntArray:
        """Position of the token that follows each row."""
        return self.starts + self.counts


def plain_plan(
    slots: IntArray,
    starts: IntArray,
    counts: IntArray,
    samples: npt.NDArray[np.bool_],
    proposed: dict[int, list[int]] | None = None,
) -> BatchPlan:
    """Return a plan of these rows, whose sequences have started with all their blocks."""
    return BatchPlan(
        step=0,
        starting=[],
        blocks=[],
        slots=slots.tolist(),
        starts=starts.tolist(),
        counts=counts.tolist(),
        samples=samples.tolist(),
        proposed=proposed or {},
    )


def batch_rows(plan: BatchPlan, table: SlotTable) -> BatchRows:
    """Look up everything that the plan's rows refer to."""
    slots = np.array(plan.slots, np.int64)
    starts = np.array(plan.starts, np.int64)
    counts = np.array(plan.counts, np.int64)
    rows = np.arange(len(slots))
    first_token, token_slots, positions = rows, slots, starts
    if plan.num_tokens != len(slots):
        ends = np.cumsum(counts)
        first_token = ends - counts
        row_of_token = np.repeat(rows, counts)
        token_slots = slots[row_of_token]
        positions = np.arange(ends[-1]) - (first_token - starts)[row_of_token]
    index, offsets = positions // table.block_size, positions % table.block_size
    cache_slots, *others = [
        tables[token_slots, index].astype(np.int64) * table.block_size + offsets
        for tables in (table.block_tables, *table.other_tables)
    ]
    return BatchRows(
        slots=slots,
        starts=starts,
        counts=counts,
        first_token=first_token,
        samples=np.flatnonzero(np.array(plan.samples, np.bool_)),
        proposing=np.array(list(plan.proposed), np.int64),
        token_ids=table.token_ids[token_slots, positions].astype(np.int64),
        positions=positions,
        turns=positions,
        adapters=table.adapters[token_slots],
        cache_slots=cache_slots,
        other_slots=tuple(others),
    )


def attention_rows(rows: BatchRows, table: SlotTable) -> AttentionRows:
    """Return the part of the batch that attention plans by.

    Each token of a row with proposed tokens is a row of its own, so that it is computed in the
    same way as if it were decoded alone, and rounded alike.
    """
    longest = int(rows.next_positions.max())
    width = -(-longest // table.block_size)
    starts, counts, first_token, slots = rows.starts, rows.counts, rows.first_token, rows.slots
    if len(rows.proposing):
        parts = np.ones(len(slots), np.int64)
        parts[rows.proposing] = counts[rows.proposing]
        row = np.repeat(np.arange(len(slots)), parts)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
        starts, first_token, slots = starts[row] + offset, first_token[row] + offset, slots[row]
        counts = np.where(parts > 1, 1, counts)[row]
    return AttentionRows(
        starts=starts,
        counts=counts,
        first_token=first_token,
        block_tables=table.block_tables[slots, :width],
        block_size=table.block_size,
        other_tables=tuple(tables[slots, :width] for tables in table.other_tables),
    )
