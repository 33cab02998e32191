"""Penalties of sequences moved from another engine, for vLLM's V1 model runner.

Tokens generated on the other engine are appended to the prompt, where vLLM's own penalties would
not count them as output.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from vllm import SamplingParams as VllmSampling
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

ARGUMENT = "swell_penalties"
"""Key in the `extra_args` of vLLM's sampling parameters."""


@dataclass(frozen=True, slots=True)
class ResumedPenalties:
    """Penalties and bad words of a sequence whose last `done` prompt tokens are output."""

    done: int
    repetition: float
    presence: float
    frequency: float
    bad_words: list[list[int]]

    @classmethod
    def taken_from(cls, params: Any, done: int) -> Self:
        """Move the penalties and bad words out of vLLM's parameters, which become neutral."""
        bad_words = params._bad_words_token_ids or []
        taken = cls(
            done,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            bad_words,
        )
        params.repetition_penalty = 1.0
        params.presence_penalty = params.frequency_penalty = 0.0
        params._bad_words_token_ids = None
        return taken

    def __call__(
        self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
    ) -> torch.Tensor:
        """Apply the penalties in place to the logits, of shape (vocabulary,)."""
        row, output = logits.unsqueeze(0), [*prompt_ids[-self.done :], *output_ids]
        apply_bad_words(row, {0: self.bad_words}, [output])

        def tensor(value: Any) -> torch.Tensor:
            return torch.tensor([value], device=logits.device)

        changed: torch.Tensor = apply_all_penalties(
            row,
            tensor(prompt_ids[: -self.done]),
            tensor(self.presence),
            tensor(self.frequency),
            tensor(self.repetition),
            [output],
        )
        return changed[0]


class PenaltiesProcessor(AdapterLogitsProcessor):  # type: ignore[misc]
    """Applies moved penalties; runs before vLLM's own penalties, which are then neutral."""

    def is_argmax_invariant(self) -> bool:
        """Always false: penalties can change the most likely token."""
        return False

    def new_req_logits_processor(self, params: VllmSampling) -> ResumedPenalties | None:
        """Return the moved penalties of a new sequence, None if it has none."""
        given = (params.extra_args or {}).get(ARGUMENT)
        return None if given is None else ResumedPenalties(**given)
