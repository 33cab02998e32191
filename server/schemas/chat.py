"""POST /v1/chat/completions: request, response and chunk."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from server.schemas.common import (
    FinishReasonField,
    JsonObject,
    OptionalTokenIds,
    RequestBody,
    SamplingFields,
    StopReasonField,
    Usage,
)


class TextPart(RequestBody):
    """A piece of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestBody):
    """One turn. What a template may read beyond role and content is passed to it as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ResponseFormat(RequestBody):
    """Shape of the answer; only plain text is served."""

    type: str


class ChatCompletionRequest(SamplingFields):
    """Write the next turn of a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(
        None, ge=1, description="Default: all that fits. max_completion_tokens wins."
    )
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, description="Needs logprobs.")
    add_generation_prompt: bool | None = Field(
        None, description="Default: true unless continue_final_message."
    )
    continue_final_message: bool | None = Field(
        False, description="Go on with the last message instead of beginning a new one."
    )
    add_special_tokens: bool | None = Field(
        False, description="Templates write special tokens themselves."
    )
    chat_template_kwargs: JsonObject | None = None
    documents: list[JsonObject] | None = None
    response_format: ResponseFormat | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None


class TopLogprob(msgspec.Struct):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One token of the answer with its alternatives, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of the answer's tokens."""

    content: list[ChatLogprob]
    refusal: list[ChatLogprob] | None = None


class AssistantMessage(msgspec.Struct):
    """The whole answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonField | None
    stop_reason: StopReasonField = None
    token_ids: OptionalTokenIds = UNSET


class ChatCompletionResponse(msgspec.Struct):
    """All answers."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: OptionalTokenIds = UNSET


class ChatDelta(msgspec.Struct):
    """What is new of an answer; the role comes once, first."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonField | None
    stop_reason: StopReasonField = None
    prompt_token_ids: OptionalTokenIds = UNSET
    token_ids: OptionalTokenIds = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """One event of a stream; the one with usage has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
