"""POST /v1/chat/completions: request, response and chunk."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from server.access.limits import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_SEQUENCES,
    MAX_TEMPLATE,
    MAX_TOKENS,
    MAX_TOOLS,
)
from server.api.shared.answer import (
    OptionalTokenIds,
    PromptLogprobs,
    RequestMetrics,
    StopReasonField,
    Usage,
)
from server.api.shared.body import JsonObject
from server.api.shared.fields import ReasoningEffort, SamplingFields, Verbosity
from server.api.shared.messages import ChatMessage
from server.api.shared.tools import (
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)

ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


# More than 15 attributes: the fields are OpenAI's and vLLM's.
class ChatFields(SamplingFields):
    """Fields of chat completions of one conversation and of several."""

    max_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Default: all that fits. max_completion_tokens wins.",
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="Needs logprobs; -1: all tokens."
    )
    echo: bool | None = Field(
        False, description="Begin the answer with the last message, if an assistant said it."
    )
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
    documents: Annotated[list[JsonObject], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="Default: auto if there are tools, else none."
    )
    parallel_tool_calls: bool | None = Field(
        True, description="Whether an answer may hold more than one call."
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE)] | None = Field(
        None, description="Instead of the model's, where the operator allows it."
    )
    include_reasoning: bool | None = Field(
        True, description="Whether the answer shows the reasoning; it is generated in any case."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="Passed to the chat template under this name."
    )
    verbosity: Verbosity | None = Field(
        None, description="Passed to the chat template under this name; few take notice."
    )
    thinking_token_budget: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="Reasoning that comes so far is ended; -1: when the tokens to generate are.",
    )
    functions: Annotated[list[JsonObject], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Refused; use tools."
    )
    function_call: str | JsonObject | None = Field(None, description="Refused; use tool_choice.")


class ChatCompletionRequest(ChatFields):
    """Write the next turn of a conversation."""

    messages: Messages


class BatchChatRequest(ChatFields):
    """Write the next turn of each of several conversations."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_SEQUENCES)]


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

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same: clients know it by either name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
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
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    """With --enable-per-request-metrics."""


class ChatDelta(msgspec.Struct):
    """What is new of an answer; the role comes once, first."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReasonField = None
    token_ids: OptionalTokenIds = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """One event of a stream; the one with usage has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: OptionalTokenIds = UNSET
    """With return_token_ids, in the first chunk of each choice."""
