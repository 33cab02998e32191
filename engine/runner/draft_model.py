"""A smaller model that drafts tokens for the served model to verify."""

import msgspec
import numpy as np
from torch import Tensor

from engine.batch.batch import BatchPlan
from engine.models.decoder import Decoder
from engine.runner.filters import Drawing
from engine.runner.inputs import attention_rows, batch_rows, draws_of, plain_plan, step_tokens
from engine.runner.kv_memory import allocate_cache
from engine.runner.sampler import draft
from engine.runner.slots import IntArray, SlotTable

_UNKNOWN = -1

_MAX_MISSING = 16
"""Maximum uncomputed tokens of a sequence without drafts before they are computed at once."""


class DraftModel:
    """Proposes tokens for the rows of a plan, with a separate KV cache.

    Its blocks have the same numbers as the served model's, so that the scheduler's decisions about
    a block (shared, freed, reclaimed) hold for both. Tokens of a sequence without drafts are
    deferred, as computing several at once is cheaper, but not beyond the step that fills their
    block, so that a cached prefix is valid for both. Only the last of accepted drafts is computed
    with the next step: if the sequence ends before, a cached block has one stale position, which
    can only make a draft wrong.
    """

    def __init__(
        self, model: Decoder, table: SlotTable, num_kv_blocks: int, drawing: Drawing
    ) -> None:
        """Allocate the KV cache; `table` is the served model's."""
        self._model = model
        self._table = table
        self._drawing = drawing
        self._cache = allocate_cache(
            model.spec, num_kv_blocks, table.block_size, model.kv_format, model.device
        )
        self._computed = np.full(len(table.block_tables), _UNKNOWN, np.int64)
        """Number of computed positions per slot; those of rejected drafts are stale."""

    def propose(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan with `DRAFT_PLACEHOLDER` replaced by tokens; write these to the table.

        The plan's starts and blocks are already in the table.
        """
        for start in plan.starting:
            self._computed[start.slot] = _UNKNOWN
        if not plan.slots:
            return plan
        slots, remaining = np.array(plan.slots, np.int64), np.zeros(len(plan.slots), np.int64)
        for row, proposed in plan.proposed.items():
            remaining[row] = len(proposed)
        drafted: dict[int, list[int]] = {row: [] for row in plan.proposed}
        rows = np.flatnonzero(remaining)
        ends, tokens = self._compute_new(plan, remaining)
        while len(rows):
            self._table.token_ids[slots[rows], ends[rows]] = tokens
            for row, token_id in zip(rows.tolist(), tokens.tolist(), strict=True):
                drafted[row].append(token_id)
            remaining[rows] -= 1
            rows = rows[remaining[rows] > 0]
            if len(rows):
                ones = np.ones(len(rows), np.int64)
                tokens = self._run(plain_plan(slots[rows], ends[rows], ones, ones.astype(np.bool_)))
                ends[rows] += 1
                self._computed[slots[rows]] = ends[rows]
        return msgspec.structs.replace(plan, proposed=drafted)

    def _compute_new(self, plan: BatchPlan, drafts: IntArray) -> tuple[IntArray, IntArray]:
        """Compute the plan's known tokens that have not been computed here.

        Args:
            plan: the step.
            drafts: [rows] number of tokens to draft per row.

        Returns:
            The end of each row without drafts, and the first draft of each drafting row.
        """
        slots, starts = np.array(plan.slots, np.int64), np.array(plan.starts, np.int64)
        known = np.array(plan.counts, np.int64) - drafts
        ends = starts + known
        # Positions computed beyond the newest token were drafts. Those before it were accepted; if
        # all were, the last one has not been computed.
        computed = self._computed[slots]
        begins = np.where(computed == _UNKNOWN, starts, np.minimum(computed, starts))
        # A decoding row can be deferred while its newest block is not full.
        fills = ends // self._table.block_size > begins // self._table.block_size
        due = fills | (known > 1) | (ends - begins >= _MAX_MISSING) | (drafts > 0)
        self._computed[slots] = np.where(due, ends, begins)
        counts = ends - begins
        # Two tokens of a decoding sequence attend as two rows, which is cheaper.
        split = (known == 1) & (counts == 2)
        order = np.argsort(np.where(counts == 1, 0, np.where(split, 1, 2)), kind="stable")
        order = order[due[order]]
        if not len(order):
            return ends, np.zeros(0, np.int64)
        tokens = self._run(
            plain_plan(
                slots[order],
                begins[order],
                counts[order],
                drafts[order] > 0,
                {row: [] for row in np.flatnonzero(split[order]).tolist()},
            )
        )
        drawn = np.zeros(len(slots), np.int64)
        drawn[order[drafts[order] > 0]] = tokens
        return ends, drawn[drafts > 0]

    def _run(self, plan: BatchPlan) -> IntArray:
        """Compute the rows of a plan; return a sample for each row that samples."""
        rows = batch_rows(plan, self._table)
        draws = draws_of(plan, rows)
        some = len(draws.tokens) < len(rows.token_ids)
        step = step_tokens(
            self._model,
            self._table,
            rows,
            attention_rows(rows, self._table),
            draws=draws if some else None,
        )
        hidden: Tensor = self._model(step, self._cache)
        if not len(draws.tokens):
            return np.zeros(0, np.int64)
        logits = self._model.logits(hidden)
        return draft(logits, self._table, draws.slots, draws.positions, drawing=self._drawing)
