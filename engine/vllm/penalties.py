"""Penalties of sequences that were begun elsewhere, for vLLM's first model runner.

What was generated elsewhere ends their prompt here, so that vLLM's own penalties would miss it.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from vllm import SamplingParams as VllmSampling
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

ARGUMENT = "swell_penalties"
"""The name in vLLM's `extra_args` of a request."""


@dataclass(frozen=True, slots=True)
class MovedPenalties:
    """Penalties and bad words of a sequence, of whose prompt the last `done` tokens are output."""

    done: int
    repetition: float
    presence: float
    frequency: float
    bad_words: list[list[int]]

    @classmethod
    def taken_from(cls, params: Any, done: int) -> Self:
        """Take them out of vLLM's parameters, whose own are then without effect."""
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
        """Change the logits of a token, of shape (vocabulary,), in place."""
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
    """Comes after vLLM's own processors and before its penalties, which then have no effect."""

    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest."""
        return False

    def new_req_logits_processor(self, params: VllmSampling) -> MovedPenalties | None:
        """Return what changes the logits of a new sequence, if anything."""
        given = (params.extra_args or {}).get(ARGUMENT)
        return None if given is None else MovedPenalties(**given)
