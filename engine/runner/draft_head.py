"""A draft head on top of the served model: drafts tokens from the model's hidden states."""

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch.batch import BatchPlan
from engine.models.device_copies import to_device
from engine.models.heads.head import DraftHead
from engine.models.step import Taps
from engine.runner.filters import Drawing
from engine.runner.host_memory import untouched_zeros
from engine.runner.inputs import (
    BatchRows,
    attention_rows,
    batch_rows,
    draws_of,
    plain_plan,
    step_tokens,
)
from engine.runner.kv_memory import allocate_cache
from engine.runner.sampler import draft
from engine.runner.slots import IntArray, SlotTable


class HeadDrafts:
    """Proposes tokens for the rows of a plan, and updates its cache from the verified step.

    The head computes each token together with the model's state before it, and stores keys and
    values for both at the token's position: in blocks with the same numbers as the model's, so that
    the scheduler's decisions about a block hold for both; they depend only on tokens up to that
    position, so they are valid for every sequence with this prefix. The first position of a
    sequence has no state before it and stores nothing.

    A sequence that starts with cached blocks was not computed here, nor was the state before its
    first new token: so the state of each block's last token is stored with the block.
    """

    def __init__(
        self, head: DraftHead, table: SlotTable, num_kv_blocks: int, drawing: Drawing
    ) -> None:
        """Allocate the KV cache; `table` is the served model's."""
        self.head = head
        self._table = table
        block, spec = head.block, head.spec
        self._drawing = drawing
        self._cache = allocate_cache(
            spec, num_kv_blocks, table.block_size, block.kv_format, block.device
        )
        max_num_seqs = len(table.block_tables)
        self._last = self._new_states(max_num_seqs)
        """[slots, hidden] state before each slot's first position that is not computed."""
        self._of_blocks = self._new_states(num_kv_blocks)
        """[blocks, hidden] state of each full block's last token."""
        self._is_new = np.zeros(max_num_seqs, np.bool_)
        """Slots whose sequence has had no step yet."""
        self._found: Tensor | None = None
        """[tokens, width] the head's input states from the step that is being computed."""

    def _new_states(self, count: int) -> Tensor:
        block, shape = self.head.block, (count, self.head.spec.hidden_size)
        if block.device.type == "cpu":
            return untouched_zeros(shape, block.dtype)
        return torch.zeros(shape, dtype=block.dtype, device=block.device)

    def new_taps(self) -> Taps:
        """Return the collector of the model's states in one step."""
        return self.head.new_taps()

    def store_states(self, hidden: Tensor, taps: Taps) -> None:
        """Store the head's inputs until the step's tokens are known: final states
        [tokens, hidden], of all tokens unless the head is tapping, or states between layers."""
        self._found = taps.states() if self.head.is_tapping else hidden

    def propose(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan with `DRAFT_PLACEHOLDER` replaced by tokens; write these to the table.

        The plan's starts and blocks are already in the table.
        """
        for start in plan.starting:
            self._is_new[start.slot] = True
        slots, positions = np.array(plan.slots, np.int64), np.array(plan.starts, np.int64)
        self._load_states(slots, positions)
        rows = np.array(list(plan.proposed), np.int64)
        if not len(rows):
            return plan
        remaining = np.array([len(plan.proposed[row]) for row in rows.tolist()], np.int64)
        slots, positions = slots[rows], positions[rows]
        drafted: dict[int, list[int]] = {row: [] for row in plan.proposed}
        states = self._last[self._tensor(slots)]
        while len(rows):
            ones = np.ones_like(slots)
            out = self._run(slots, positions, ones, states, wants_draws=True)
            logits, states = self.head.predict(out)
            positions = positions + 1
            tokens = draft(logits, self._table, slots, positions, drawing=self._drawing)
            self._table.token_ids[slots, positions] = tokens
            for row, token_id in zip(rows.tolist(), tokens.tolist(), strict=True):
                drafted[row].append(token_id)
            remaining = remaining - 1
            go_on = np.flatnonzero(remaining)
            if len(go_on) < len(rows):
                rows, slots, positions, remaining = (
                    each[go_on] for each in (rows, slots, positions, remaining)
                )
                states = states.index_select(0, self._tensor(go_on))
        return msgspec.structs.replace(plan, proposed=drafted)

    def observe(self, plan: BatchPlan, rows: BatchRows, accepted: dict[int, int]) -> None:
        """Update the cache from a step whose tokens are known now.

        `accepted`: number of accepted drafts per row with drafts.
        """
        assert self._found is not None, "the model has computed the step"
        states, self._found = self.head.project(self._found), None
        counts = rows.counts.copy()
        for row, right in accepted.items():
            counts[row] = 1 + right
        # The first token of a drafting row was computed while drafting, from the same state.
        begins = rows.starts.copy()
        begins[list(plan.proposed)] += 1
        begins = np.maximum(begins, 1)
        self._compute(rows, begins, rows.starts + counts, states)
        self._keep(rows, counts, states)

    def _load_states(self, slots: IntArray, starts: IntArray) -> None:
        """Load the states before sequences that start with cached blocks."""
        new = self._is_new[slots]
        if not new.any():
            return
        self._is_new[slots] = False
        slots, starts = slots[new & (starts > 0)], starts[new & (starts > 0)]
        if len(slots):
            blocks = self._table.block_tables[slots, starts // self._table.block_size - 1]
            self._last[self._tensor(slots)] = self._of_blocks[self._tensor(blocks)]

    def _compute(self, rows: BatchRows, begins: IntArray, ends: IntArray, states: Tensor) -> None:
        """Fill the head's cache for the positions of each row from `begins` up to `ends`."""
        counts = ends - begins
        chosen = np.flatnonzero(counts > 0)
        if not len(chosen):
            return
        # One-token rows come first, as executors may require.
        chosen = chosen[np.argsort(counts[chosen] > 1, kind="stable")]
        counts, begins = counts[chosen], begins[chosen]
        row = np.repeat(chosen, counts)
        last = np.cumsum(counts)
        positions = np.repeat(begins, counts) + np.arange(last[-1])
        positions -= np.repeat(last - counts, counts)
        offsets = positions - rows.starts[row]
        # The state before a row's first token comes from the previous step.
        before = np.where(offsets > 0, rows.first_token[row] + offsets - 1, len(states) + row)
        known = torch.cat((states, self._last[self._tensor(rows.slots)]))
        known_states = known.index_select(0, self._tensor(before))
        self._run(rows.slots[chosen], begins, counts, known_states, wants_draws=False)

    def _keep(self, rows: BatchRows, counts: IntArray, states: Tensor) -> None:
        """Store the last state of each row, and of each block that is full now."""
        last = rows.first_token + counts - 1
        self._last[self._tensor(rows.slots)] = states.index_select(0, self._tensor(last))
        row = np.repeat(np.arange(len(rows.counts)), rows.counts)
        size, following = self._table.block_size, rows.positions + 1
        is_known = following <= (rows.starts + counts)[row]
        full = np.flatnonzero(is_known & (following % size == 0))
        if len(full):
            blocks = self._table.block_tables[rows.slots[row[full]], rows.positions[full] // size]
            self._of_blocks[self._tensor(blocks)] = states.index_select(0, self._tensor(full))

    def _run(
        self,
        slots: IntArray,
        starts: IntArray,
        counts: IntArray,
        states: Tensor,
        *,
        wants_draws: bool,
    ) -> Tensor:
        """Compute some positions of slots, given the states before them.

        Without draws, computes only what the cache stores.
        """
        plan = plain_plan(slots, starts, counts, np.full(len(slots), wants_draws))
        rows = batch_rows(plan, self._table)
        step = step_tokens(
            self.head.block,
            self._table,
            rows,
            attention_rows(rows, self._table),
            draws=None if wants_draws else draws_of(plan, rows),
        )
        out: Tensor = self.head(step, states, self._cache)
        return out

    def _tensor(self, array: npt.NDArray[np.integer]) -> Tensor:
        return to_device(np.ascontiguousarray(array, dtype=np.int64), self.head.block.device)
