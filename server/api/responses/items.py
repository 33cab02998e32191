"""POST /v1/responses: the response and the items of its output."""

import base64
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.api.chat.schema import ChatLogprob
from server.schema.body import JsonObject

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[JsonObject] = []
    logprobs: list[ChatLogprob] = []


class ReasoningTextPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The model's reasoning."""

    id: str
    status: ItemStatus
    content: list[ReasoningTextPart]
    summary: list[JsonObject] = []
    encrypted_content: str | None = None


class OutputFunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function call for the client to run; its output refers to `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomToolCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a tool with plain text input; its output refers to `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ShellAction(msgspec.Struct, tag_field="type", tag="exec"):
    """A command for the client to run."""

    command: list[str]
    timeout_ms: int | None = None
    working_directory: str | None = None
    env: dict[str, str] = {}
    user: str | None = None


class OutputLocalShellCall(msgspec.Struct, tag_field="type", tag="local_shell_call"):
    """A shell call for the client to run; its output refers to `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    action: ShellAction


class OutputToolSearchCall(msgspec.Struct, tag_field="type", tag="tool_search_call"):
    """A tool search for the client to run; its output refers to `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    arguments: JsonObject
    execution: Literal["client"] = "client"


OutputItem = (
    OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomToolCall
    | OutputLocalShellCall | OutputToolSearchCall
)  # fmt: skip


class InputTokensDetails(msgspec.Struct):
    """Breakdown of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """Always 0: writing to the prefix cache is not metered."""


class OutputTokensDetails(msgspec.Struct):
    """Breakdown of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class ConversationId(msgspec.Struct):
    """ID of the conversation that a response was added to."""

    id: str


class Response(msgspec.Struct, kw_only=True):
    """A response, with the parameters of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: ResponseStatus = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    text: JsonObject
    tool_choice: Any
    tools: list[JsonObject]
    reasoning: JsonObject
    user: str | None
    background: bool = False
    previous_response_id: str | None = None
    conversation: ConversationId | None = None
    store: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"


class Compaction(msgspec.Struct, kw_only=True):
    """Replacement for a conversation: the users' messages, and a summary."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[JsonObject]
    usage: ResponseUsage | None


SUMMARY_MARK = b"swell-summary:"
"""Prefix of a summary before base64 encoding, in items of type `compaction`."""


def summary_of(content: str | None) -> str | None:
    """Return the summary in a compaction item; None if another server made the item."""
    try:
        decoded = base64.b64decode(content or "", validate=True)
        return (
            decoded.removeprefix(SUMMARY_MARK).decode()
            if decoded.startswith(SUMMARY_MARK)
            else None
        )
    except ValueError:
        return None


class InputTokens(msgspec.Struct):
    """Number of tokens of a response's input."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Deleted(msgspec.Struct):
    """Confirmation of a deletion."""

    id: str
    object: str
    deleted: bool = True


class ItemList(msgspec.Struct):
    """A page of the items of a response's input or of a conversation."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Conversation(msgspec.Struct):
    """A list of items that requests continue and append to."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"
