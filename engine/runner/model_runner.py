"""Turns batch plans into tokens; owner of the KV cache and of all per-slot state."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.messages import TokenLogprob
from engine.models.decoder import Decoder, StepTokens
from engine.runner.inputs import BatchRows, attention_rows, batch_rows
from engine.runner.kv_memory import allocate_cache
from engine.runner.logprobs import token_logprobs
from engine.runner.sampler import sample
from engine.runner.slots import NO_LOGPROBS, SlotTable
from engine.scheduler.batch import BatchPlan, BatchResult

_PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose full logits are held at once."""


class ModelRunner:
    """Runs the plans of one engine, in order, on one model replica."""

    def __init__(
        self,
        model: Decoder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_kv_blocks: int,
        block_size: int,
    ) -> None:
        self.model = model
        self._cache = allocate_cache(
            model.spec, num_kv_blocks, block_size, model.dtype, model.device
        )
        self._table = SlotTable(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=model.spec.eos_token_ids,
        )

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> BatchResult:
        """Compute the plan's rows, draw tokens and append them to their slots.

        Raises:
            ValueError: a starting sequence does not fit the model.
        """
        self._update(plan)
        if not plan.slots:
            return BatchResult(token_ids=[])
        rows = batch_rows(plan, self._table)
        hidden = self._compute(rows)
        prompt_logprobs = self._prompt_logprobs(rows, hidden)
        if not len(rows.samples):
            return BatchResult(token_ids=[], prompt_logprobs=prompt_logprobs)
        slots, positions = rows.slots[rows.samples], rows.next_positions[rows.samples]
        logits = self._logits(hidden, rows.last_tokens[rows.samples])
        sampled = sample(logits, self._table, slots, positions)
        self._table.token_ids[slots, positions] = sampled.token_ids
        return BatchResult(
            token_ids=sampled.token_ids.tolist(),
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    @torch.inference_mode()
    def hidden_states(self, plan: BatchPlan) -> Tensor:
        """Do all of a step but the sampling; return the final states [tokens, hidden]."""
        self._update(plan)
        return self._compute(batch_rows(plan, self._table))

    def _update(self, plan: BatchPlan) -> None:
        for start in plan.starting:
            self._table.start(start)
        for blocks in plan.blocks:
            self._table.append_blocks(blocks)

    def _compute(self, rows: BatchRows) -> Tensor:
        model = self.model
        shape = attention_rows(rows, self._table)
        step = StepTokens(
            token_ids=self._tensor(rows.token_ids),
            positions=self._tensor(rows.positions),
            slots=self._tensor(rows.cache_slots),
            plans={window: model.attention.plan(shape, window) for window in model.windows},
        )
        return model.hidden_states(step, self._cache)

    def _logits(self, hidden: Tensor, tokens: npt.NDArray[np.int64]) -> Tensor:
        if len(tokens) != len(hidden):
            hidden = hidden.index_select(0, self._tensor(tokens))
        return self.model.logits(hidden)

    def _prompt_logprobs(self, rows: BatchRows, hidden: Tensor) -> dict[int, list[TokenLogprob]]:
        """Report each prompt token that follows a computed one."""
        wanted = self._table.sampling.prompt_logprobs[rows.slots]
        result: dict[int, list[TokenLogprob]] = {}
        for row in np.flatnonzero(wanted != NO_LOGPROBS).tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            end = min(start + int(rows.counts[row]) + 1, int(self._table.num_prompt_tokens[slot]))
            following = self._table.token_ids[slot, start + 1 : end].astype(np.int64)
            first = int(rows.first_token[row])
            entries: list[TokenLogprob] = []
            for offset in range(0, len(following), _PROMPT_LOGPROB_ROWS):
                chosen = following[offset : offset + _PROMPT_LOGPROB_ROWS]
                states = hidden[first + offset : first + offset + len(chosen)]
                many = np.full(len(chosen), wanted[row])
                entries += token_logprobs(self.model.logits(states), chosen, many)
            if entries:
                result[row] = entries
        return result

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)
