"""Pieces that the answers of several endpoints have in common."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """What the completion's tokens were for."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType
    """Not shown where the operator hides it."""
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, as far as that is shown."""
        details = self.prompt_tokens_details
        return 0 if isinstance(details, UnsetType) else details.cached_tokens


class RequestMetrics(msgspec.Struct):
    """How long the engines took for an answer of one sequence."""

    time_to_first_token_ms: float
    """From the first step that it was planned for; it had waited before."""
    generation_time_ms: float
    """From its first token to its last."""
    queue_time_ms: float
    mean_itl_ms: float | UnsetType = UNSET
    """From one token to the next; absent for a single one."""
    tokens_per_second: float | UnsetType = UNSET
    """Since it was first planned."""


class PromptLogprob(msgspec.Struct):
    """How likely a token is at a position of the prompt; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of the prompt: itself first, then the most likely ones; the first
token has none."""


FinishReasonField = Literal["stop", "length", "abort"]
StopReasonField = int | str | None
OptionalTokenIds = list[int] | UnsetType | None
