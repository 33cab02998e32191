"""Has a model answer prompts, and keeps the states that it computes on the way."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.draft_head.prompts import Prompt
from engine.models.decoder import Decoder, Taps
from engine.runner.inputs import attention_rows, batch_rows
from engine.runner.kv_memory import allocate_cache
from engine.runner.sampler import sample
from engine.runner.slots import SlotTable
from engine.runner.step_input import step_tokens
from engine.scheduler.batch import BatchPlan, SlotBlocks, SlotStart
from engine.shared.messages import SamplingParams

_BLOCK_SIZE = 16


class Answered(NamedTuple):
    """A prompt with its answer, and the states of all of its tokens but the last."""

    token_ids: Tensor
    """[tokens] int32"""
    tapped: Tensor
    """[tokens - 1, layers * hidden] float32: what a draft head takes."""
    final: Tensor
    """[tokens - 1, hidden] float32: what logits are made of."""
    num_prompt_tokens: int


class _Running(NamedTuple):
    """A sequence that is being written."""

    token_ids: list[int]
    num_prompt_tokens: int
    tapped: list[Tensor]
    final: list[Tensor]

    @property
    def num_computed(self) -> int:
        """How many of its tokens have states."""
        return len(self.token_ids) - 1 if self.final else 0

    def answered(self) -> Answered:
        """Return what was written."""
        return Answered(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int32),
            tapped=torch.cat(self.tapped).float(),
            final=torch.cat(self.final).float(),
            num_prompt_tokens=self.num_prompt_tokens,
        )


class Writer:
    """A model that answers several prompts at once, each in a slot of its own."""

    def __init__(
        self, model: Decoder, layers: tuple[int, ...], *, slots: int, longest: int
    ) -> None:
        """Allocate a KV cache for so many sequences of at most `longest` tokens each.

        `layers` says after how many layers states are taken.
        """
        self._model = model
        self._layers = layers
        self._longest = longest
        self._blocks = -(-(longest + 1) // _BLOCK_SIZE)
        self._table = SlotTable(
            max_num_seqs=slots,
            max_model_len=longest,
            block_size=_BLOCK_SIZE,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=model.spec.eos_token_ids,
        )
        self._cache = allocate_cache(
            model.spec, slots * self._blocks, _BLOCK_SIZE, model.kv_format, model.device
        )
        self._running: dict[int, _Running] = {}
        self._free = list(range(slots))

    @torch.inference_mode()
    def answer(self, prompts: Iterator[Prompt], tokens: int) -> Iterator[Answered]:
        """Yield prompts with answers of at most `tokens` tokens, in the order in which they end.

        Prompts are asked for as slots are free; those too long for a slot are left out.
        """
        while True:
            while self._free and (prompt := next(prompts, None)) is not None:
                if len(prompt.token_ids) + tokens <= self._longest:
                    self._start(prompt)
            if not self._running:
                return
            yield from self._step(tokens)

    def _start(self, prompt: Prompt) -> None:
        slot = self._free.pop()
        sampling = SamplingParams(
            max_tokens=self._longest, seed=prompt.seed, temperature=prompt.temperature
        )
        token_ids = list(prompt.token_ids)
        self._table.start(SlotStart(slot, token_ids, len(token_ids), sampling))
        blocks = range(slot * self._blocks, (slot + 1) * self._blocks)
        self._table.append_blocks(SlotBlocks(slot, 0, list(blocks)))
        self._running[slot] = _Running(token_ids, len(token_ids), [], [])

    def _step(self, tokens: int) -> Iterator[Answered]:
        """Write one token of each sequence; yield those that have ended."""
        running = self._running
        # Rows of one token come before all others.
        slots = sorted(running, key=lambda slot: running[slot].num_computed == 0)
        starts = [running[slot].num_computed for slot in slots]
        counts = [
            len(running[slot].token_ids) - start for slot, start in zip(slots, starts, strict=True)
        ]
        drawn, tapped, final = self._compute(slots, starts, counts)
        for slot, token_id, taps, states in zip(
            slots, drawn, torch.split(tapped, counts), torch.split(final, counts), strict=True
        ):
            each = running[slot]
            each.token_ids.append(token_id)
            each.tapped.append(taps)
            each.final.append(states)
            ended = token_id in self._model.spec.eos_token_ids
            if ended or len(each.token_ids) == each.num_prompt_tokens + tokens:
                yield running.pop(slot).answered()
                self._free.append(slot)

    def _compute(
        self, slots: list[int], starts: list[int], counts: list[int]
    ) -> tuple[list[int], Tensor, Tensor]:
        """Compute some positions; return a token for each row, and the states of all tokens."""
        rows = batch_rows(
            BatchPlan(
                step=0,
                starting=[],
                blocks=[],
                slots=slots,
                starts=starts,
                counts=counts,
                samples=[True] * len(slots),
            ),
            self._table,
        )
        taps = Taps(self._layers)
        step = step_tokens(
            self._model, self._table, rows, attention_rows(rows, self._table), draws=None, taps=taps
        )
        final = self._model.hidden_states(step, self._cache)
        logits = self._model.logits(final[torch.from_numpy(rows.last_tokens)])
        drawn = sample(logits, self._table, rows.slots, rows.next_positions).token_ids
        self._table.token_ids[rows.slots, rows.next_positions] = drawn
        return np.asarray(drawn).tolist(), taps.states(), final
