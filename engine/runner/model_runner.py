"""Turns batch plans into tokens; owner of the KV cache and of all per-slot state."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.grammar.masks import Ends, GrammarTable
from engine.models.attention.varlen import to_device
from engine.models.decoder import Decoder, FinalTokens, StepTokens
from engine.runner.cuda_graphs import DecodeGraphs, can_record
from engine.runner.head_threads import head_threads
from engine.runner.inputs import BatchRows, attention_rows, batch_rows
from engine.runner.kv_memory import allocate_cache
from engine.runner.logprobs import token_logprobs
from engine.runner.sampler import sample
from engine.runner.slots import NO_LOGPROBS, SlotTable
from engine.runner.verification import (
    Draws,
    draw_rows,
    draws_of,
    verified,
    write_proposed,
)
from engine.scheduler.batch import BatchPlan, BatchResult
from engine.shared.messages import TokenLogprob

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
        grammars: GrammarTable | None = None,
        record_decodes: bool = True,
        max_head_threads: int = 1,
    ) -> None:
        """Allocate the KV cache; on CUDA, record decode steps as graphs unless told not to.

        `max_head_threads` is how many the LM head of a large batch may have, should that be more
        than the layers have.
        """
        self.model = model
        self._max_head_threads = max_head_threads
        self._grammars = grammars
        on_cuda = model.device.type == "cuda"
        # Padding of recorded steps gets a block of its own, behind those of sequences.
        self._cache = allocate_cache(
            model.spec, num_kv_blocks + on_cuda, block_size, model.cache_dtype, model.device
        )
        self._table = SlotTable(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=model.spec.eos_token_ids,
        )
        self._graphs: DecodeGraphs | None = None
        if on_cuda and record_decodes and can_record(model, block_size):
            self._graphs = DecodeGraphs(
                model,
                self._cache,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                scratch_block=num_kv_blocks,
            )

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> BatchResult:
        """Compute the plan's rows, draw tokens and append them to their slots.

        Raises:
            ValueError: a starting sequence does not fit the model.
        """
        self._update(plan)
        if not plan.slots:
            self.model.dummy_step()
            return BatchResult(token_ids=[])
        rows = batch_rows(plan, self._table)
        draws, grammars = draws_of(plan, rows), self._grammars
        hidden, prompt_logprobs = self._states(rows, draws)
        if not len(rows.samples):
            return BatchResult(token_ids=[], prompt_logprobs=prompt_logprobs)
        with head_threads(self._max_head_threads, hidden.numel() * self.model.spec.vocab_size):
            logits = self.model.logits(hidden)
            masks = None
            if grammars is not None:
                proposed = {plan.slots[row]: tokens for row, tokens in plan.proposed.items()}
                masks = grammars.masks(draws.slots.tolist(), proposed)
            sampled = sample(logits, self._table, draws.slots, draws.positions, masks)
        self._table.token_ids[draws.slots, draws.positions] = sampled.token_ids
        if plan.proposed:
            return verified(plan, draws, sampled, prompt_logprobs, grammars)
        token_ids, ends = sampled.token_ids.tolist(), Ends({}, {}, {})
        if grammars is not None:
            ends = grammars.advance(draws.slots.tolist(), token_ids)
        return BatchResult(
            token_ids=token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar_ends=ends.reasons,
            grammar_stalls=ends.stalls,
            mask_us={} if grammars is None else grammars.mask_us,
        )

    @torch.inference_mode()
    def hidden_states(self, plan: BatchPlan) -> Tensor:
        """Do all of a step but the sampling; return the final states [tokens, hidden]."""
        self._update(plan)
        return self._compute(batch_rows(plan, self._table), None)

    def _update(self, plan: BatchPlan) -> None:
        for start in plan.starting:
            self._table.start(start)
            if self._grammars is not None:
                self._grammars.start(start)
        for blocks in plan.blocks:
            self._table.append_blocks(blocks)
        write_proposed(plan, self._table)

    def _states(
        self, rows: BatchRows, draws: Draws
    ) -> tuple[Tensor, dict[int, list[TokenLogprob]]]:
        """Return the final states [draws, hidden], and what is to be reported of prompts."""
        reporting = np.flatnonzero(self._table.sampling.prompt_logprobs[rows.slots] != NO_LOGPROBS)
        others = len(draws.tokens) < len(rows.token_ids)
        only_draws = others and not len(reporting) and self.model.is_alone
        hidden = self._compute(rows, draws if only_draws else None)
        prompt_logprobs = self._prompt_logprobs(rows, reporting, hidden)
        if len(draws.tokens) < len(hidden):
            hidden = hidden.index_select(0, self._tensor(draws.tokens))
        return hidden, prompt_logprobs

    def _compute(self, rows: BatchRows, draws: Draws | None) -> Tensor:
        """Return the states of all tokens; with `draws`, where they can be told apart, of those."""
        model = self.model
        shape = attention_rows(rows, self._table)
        if self._graphs is not None and (hidden := self._graphs.run(rows, shape)) is not None:
            return hidden
        final = None
        if draws is not None:
            ends = draw_rows(draws, self._table)
            plan = model.attention.plan(ends, model.last_window) if len(draws.tokens) else None
            final = FinalTokens(self._tensor(draws.tokens), plan)
        step = StepTokens(
            token_ids=self._tensor(rows.token_ids),
            positions=self._tensor(rows.positions),
            slots=self._tensor(rows.cache_slots),
            rows=shape,
            plans={window: model.attention.plan(shape, window) for window in model.windows},
            final=final,
        )
        return model.hidden_states(step, self._cache)

    def _prompt_logprobs(
        self, rows: BatchRows, reporting: npt.NDArray[np.int64], hidden: Tensor
    ) -> dict[int, list[TokenLogprob]]:
        """Report each prompt token that follows a computed one."""
        wanted = self._table.sampling.prompt_logprobs[rows.slots]
        result: dict[int, list[TokenLogprob]] = {}
        for row in reporting.tolist():
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
        return to_device(array, self.model.device)
