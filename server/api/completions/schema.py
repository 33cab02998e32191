"""POST /v1/completions: request, response and chunk."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from server.limits import MAX_CHOICES, MAX_PROMPTS
from server.schema.answer import (
    FinishReasonField,
    OptionalTokenIds,
    PromptLogprobs,
    RequestMetrics,
    StopReasonField,
    Usage,
)
from server.schema.body import Alternatives, Count, Tokens
from server.schema.fields import SamplingFields, TokenIds
from server.schema.kv_transfer import RemoteKvBlocks
from server.schema.support import NO_BUDGET, TOP_LOGPROBS, Rows, different, extra, refused

Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[
        list[Annotated[TokenIds, Field(min_length=1)]],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
    ]
)


class CompletionRequest(SamplingFields):
    """Continue one or more prompts."""

    id_fields: ClassVar[frozenset[str]] = frozenset({"prompt"})

    prompt: Annotated[Prompts, Field(union_mode="left_to_right")] = Field(
        description="A string, a list of strings, token ids, or a list of token-id lists."
    )
    suffix: str | None = Field(
        None,
        description="Refused unless empty: no model here infills.",
        json_schema_extra=extra("refused", "infilling is not supported", "", example="end"),
    )
    max_tokens: Count | None = Field(
        None,
        description="Default: 16, or what fits. 0 only with echo: the prompt is scored, nothing "
        "is generated.",
    )
    max_completion_tokens: Tokens | None = Field(
        None,
        description="Another name for max_tokens, which wins.",
        json_schema_extra=different("max_tokens wins; vLLM ignores it here"),
    )
    logprobs: Alternatives | None = Field(
        None, description="-1: all tokens.", json_schema_extra=TOP_LOGPROBS
    )
    echo: bool | None = False
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Sequences per prompt, of which the n best count.",
        json_schema_extra=different("must equal n in a stream"),
    )
    add_special_tokens: bool | None = True

    undeclared: ClassVar[Rows] = {
        **refused("prompts are texts or token ids", "prompt_embeds"),
        **refused("use logprobs", "top_logprobs"),
        **NO_BUDGET,
    }


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one element per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One continuation; in a stream, its new part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonField | None
    stop_reason: StopReasonField = None
    prompt_token_ids: OptionalTokenIds = UNSET
    token_ids: OptionalTokenIds = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct):
    """All continuations, grouped by prompt."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None
    object: Literal["text_completion"] = "text_completion"
    metrics: RequestMetrics | UnsetType = UNSET
    """With --enable-per-request-metrics."""
    kv_transfer_params: RemoteKvBlocks | UnsetType | None = UNSET
