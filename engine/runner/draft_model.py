"""A smaller model beside the one that is served: it drafts the tokens that this one verifies."""

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

_MOST_LEFT = 16
"""Tokens of a sequence that are left to be computed at once when nothing is drafted for it."""


class DraftModel:
    """Proposes tokens for the rows of a plan, from keys and values of its own.

    These lie in blocks of the same numbers as those of the model that is served, so that whatever
    the scheduler decides about a block (shared, freed, taken back) holds for both. The tokens of a
    sequence that gets no draft are left for later, as that is cheaper for several at once, but not
    beyond the step that fills their block, so that a cached prefix is one for both. Only the last
    of accepted drafts is computed here with the next step: where its sequence ends before, a
    cached block has a position that was not, which can make a draft wrong and nothing else.
    """

    def __init__(
        self, model: Decoder, table: SlotTable, num_kv_blocks: int, drawing: Drawing
    ) -> None:
        """Allocate its KV cache; `table` is that of the model that is served."""
        self._model = model
        self._table = table
        self._drawing = drawing
        self._cache = allocate_cache(
            model.spec, num_kv_blocks, table.block_size, model.kv_format, model.device
        )
        self._computed = np.full(len(table.block_tables), _UNKNOWN, np.int64)
        """For each slot how many positions have been computed; drafts among them may be wrong."""

    def propose(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan with tokens in place of `TO_BE_DRAFTED`, and write them to the table.

        The table has the starts and blocks of the plan already.
        """
        for start in plan.starting:
            self._computed[start.slot] = _UNKNOWN
        if not plan.slots:
            return plan
        slots, left = np.array(plan.slots, np.int64), np.zeros(len(plan.slots), np.int64)
        for row, proposed in plan.proposed.items():
            left[row] = len(proposed)
        drafted: dict[int, list[int]] = {row: [] for row in plan.proposed}
        rows = np.flatnonzero(left)
        ends, tokens = self._compute_new(plan, left)
        while len(rows):
            self._table.token_ids[slots[rows], ends[rows]] = tokens
            for row, token_id in zip(rows.tolist(), tokens.tolist(), strict=True):
                drafted[row].append(token_id)
            left[rows] -= 1
            rows = rows[left[rows] > 0]
            if len(rows):
                ones = np.ones(len(rows), np.int64)
                tokens = self._run(plain_plan(slots[rows], ends[rows], ones, ones.astype(np.bool_)))
                ends[rows] += 1
                self._computed[slots[rows]] = ends[rows]
        return msgspec.structs.replace(plan, proposed=drafted)

    def _compute_new(self, plan: BatchPlan, drafts: IntArray) -> tuple[IntArray, IntArray]:
        """Compute the tokens of the plan that are known and have not been computed here.

        Args:
            plan: the step.
            drafts: [rows] how many tokens each row has to be given.

        Returns:
            The end of each row without drafts, and the first draft of each row that gets some.
        """
        slots, starts = np.array(plan.slots, np.int64), np.array(plan.starts, np.int64)
        known = np.array(plan.counts, np.int64) - drafts
        ends = starts + known
        # What was computed behind the newest token were drafts. Those before it were accepted, and
        # the last of them, if all were, has not been computed.
        computed = self._computed[slots]
        begins = np.where(computed == _UNKNOWN, starts, np.minimum(computed, starts))
        # What decodes can be left for later while its newest block is not full.
        fills = ends // self._table.block_size > begins // self._table.block_size
        due = fills | (known > 1) | (ends - begins >= _MOST_LEFT) | (drafts > 0)
        self._computed[slots] = np.where(due, ends, begins)
        counts = ends - begins
        # Two tokens of a sequence that decodes attend as two rows: it is cheaper.
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
        """Compute the rows of a plan; return a draw for each that samples."""
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
