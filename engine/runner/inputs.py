"""Conversion of a batch plan to a decoder's input tensors."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.batch.batch import BatchPlan
from engine.models.adapters import AdapterRows
from engine.models.attention.rows import AttentionRows
from engine.models.decoder import Decoder
from engine.models.device_copies import to_device
from engine.models.step import (
    NO_TAPS,
    FinalTokens,
    GroupTokens,
    ImageTokens,
    StepTokens,
    Taps,
    WholeImages,
)
from engine.runner.slots import IntArray, SlotTable


class BatchRows(msgspec.Struct, frozen=True):
    """The rows of a plan and their tokens, concatenated."""

    slots: IntArray
    starts: IntArray
    counts: IntArray
    first_token: IntArray
    """Index of each row's first token."""
    samples: IntArray
    """Rows that sample a token."""
    proposing: IntArray
    """Rows with draft tokens."""
    token_ids: IntArray
    positions: IntArray
    """Position of each token in its sequence."""
    turns: IntArray
    """Rotary positions, [tokens] or [3, tokens], equal to `positions` unless there are images: see
    `StepTokens.positions`."""
    adapters: IntArray
    """Adapter slot of each token; -1 for none."""
    cache_slots: IntArray
    """Flat index of each token in a layer's cache, for layers of the first group."""
    other_slots: tuple[IntArray, ...] = ()
    """The same for the other groups."""

    @property
    def last_tokens(self) -> IntArray:
        """Index of each row's last token."""
        return self.first_token + self.counts - 1

    @property
    def next_positions(self) -> IntArray:
        """Position of the token after each row."""
        return self.starts + self.counts


def plain_plan(
    slots: IntArray,
    starts: IntArray,
    counts: IntArray,
    samples: npt.NDArray[np.bool_],
    proposed: dict[int, list[int]] | None = None,
) -> BatchPlan:
    """Return a plan of these rows, whose sequences and blocks are already in the table."""
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
    """Gather everything that the plan's rows refer to."""
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
    """Return the rows' layout for attention.

    Each token of a row with proposed tokens is a separate row, so that it is computed, and rounded,
    exactly as if it were decoded alone.
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


class Draws(msgspec.Struct, frozen=True):
    """The step's tokens after which a token is sampled, in row order."""

    tokens: IntArray
    """Index among the step's tokens."""
    slots: IntArray
    positions: IntArray
    """Position of the token to sample."""
    first: dict[int, int]
    """Index of the first sample of each row with proposed tokens."""


def write_proposed(plan: BatchPlan, table: SlotTable) -> None:
    """Write proposed tokens at the positions that they get if accepted.

    So everything that depends on a sequence's tokens (input, penalties) is correct for every sample
    that is kept. Rejected tokens are overwritten before they matter.
    """
    for row, proposed in plan.proposed.items():
        first = plan.starts[row] + 1
        table.token_ids[plan.slots[row], first : first + len(proposed)] = proposed


def draws_of(plan: BatchPlan, rows: BatchRows) -> Draws:
    """Return one sample per row that samples, plus one per proposed token."""
    samples = rows.samples
    if not any(plan.proposed.values()):
        last, positions = rows.last_tokens[samples], rows.next_positions[samples]
        return Draws(last, rows.slots[samples], positions, {})
    counts = np.array([1 + len(plan.proposed.get(row, ())) for row in samples.tolist()])
    ends = np.cumsum(counts)
    repeated = np.repeat(samples, counts)
    # Offset back from the row's last token and next position.
    back = np.repeat(ends, counts) - np.arange(ends[-1]) - 1
    return Draws(
        tokens=rows.last_tokens[repeated] - back,
        slots=rows.slots[repeated],
        positions=rows.next_positions[repeated] - back,
        first={
            row: first
            for row, first in zip(samples.tolist(), (ends - counts).tolist(), strict=True)
            if row in plan.proposed
        },
    )


def draw_rows(draws: Draws, table: SlotTable) -> AttentionRows:
    """Return each token to sample after as a separate row."""
    width = -(-int(draws.positions.max(initial=1)) // table.block_size)
    return AttentionRows(
        starts=draws.positions - 1,
        counts=np.ones_like(draws.positions),
        first_token=np.arange(len(draws.positions)),
        block_tables=table.block_tables[draws.slots, :width],
        block_size=table.block_size,
        other_tables=tuple(tables[draws.slots, :width] for tables in table.other_tables),
    )


def step_tokens(
    model: Decoder,
    table: SlotTable,
    rows: BatchRows,
    shape: AttentionRows,
    *,
    draws: Draws | None,
    adapters: AdapterRows | None = None,
    taps: Taps = NO_TAPS,
    images: ImageTokens | None = None,
) -> StepTokens:
    """Return the model's input for these rows.

    Final states are computed only for `draws`; None for all tokens. States between layers are
    passed to `taps`.
    """
    device, final = model.device, None
    if draws is not None:
        spec = model.spec
        ends = draw_rows(draws, table).of_group(spec.cache_groups.group_of(spec.num_layers - 1))
        plan = model.attention.plan(ends, spec.windows[-1]) if len(draws.tokens) else None
        final = FinalTokens(to_device(draws.tokens, device), plan)
    return StepTokens(
        token_ids=to_device(rows.token_ids, device),
        positions=to_device(rows.turns, device),
        slots=to_device(rows.cache_slots, device),
        rows=shape,
        plans=plans_of(model, shape, 0),
        final=final,
        adapters=adapters,
        others=other_groups(model, shape, [to_device(each, device) for each in rows.other_slots]),
        taps=taps,
        images=images,
    )


def plans_of(model: Decoder, shape: AttentionRows, group: int) -> dict[int | None, Any]:
    """Return the attention plans of a group's layers, by window."""
    rows = shape.of_group(group)
    return {window: model.attention.plan(rows, window) for window in model.windows[group]}


def whole_images(
    model: Decoder, rows: AttentionRows, queries: Tensor, computed: Tensor
) -> WholeImages:
    """Return the attention plans of image tokens, one row per image, in this process's layers."""
    attention = model.image_attention
    assert attention is not None, "tokens of the model's images attend as others do"
    plans = tuple(
        {window: attention.plan_whole(rows.of_group(group), window) for window in windows}
        for group, windows in enumerate(model.windows)
    )
    return WholeImages(queries, computed, rows, plans)


def other_groups(
    model: Decoder, shape: AttentionRows, slots: Sequence[Tensor]
) -> tuple[GroupTokens, ...]:
    """Return the inputs of the groups of layers after the first, given their cache slots."""
    return tuple(
        GroupTokens(each, plans_of(model, shape, group)) for group, each in enumerate(slots, 1)
    )
