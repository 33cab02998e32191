"""POST /v1/chat/completions: request, response and chunk."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from server import limits
from server.schema.answer import (
    OptionalTokenIds,
    PromptLogprobs,
    RequestMetrics,
    StopReasonField,
    Usage,
)
from server.schema.body import Alternatives, JsonObject, RequestBody, Tokens
from server.schema.fields import ReasoningEffort, SamplingFields, Verbosity
from server.schema.kv_transfer import RemoteKvBlocks
from server.schema.messages import ChatMessage
from server.schema.support import (
    CHAT_TEMPLATE,
    TOP_LOGPROBS,
    Row,
    Rows,
    different,
    extra,
    ignored,
    refused,
)
from server.schema.tools import (
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)

ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES)]


class ThinkingSwitch(RequestBody):
    """Whether the model reasons before it answers, as in the APIs of GLM, Kimi and DeepSeek."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = Field(None, description="As thinking_token_budget.")
    clear_thinking: bool | None = Field(
        None, description="Passed to the chat template under this name."
    )


class ChatFields(SamplingFields):
    """Fields common to chat completions of one and of several conversations."""

    max_tokens: Tokens | None = Field(
        None, description="Default: the rest of the context. max_completion_tokens wins."
    )
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = False
    top_logprobs: Alternatives | None = Field(
        None, description="Needs logprobs; -1: all tokens.", json_schema_extra=TOP_LOGPROBS
    )
    echo: bool | None = Field(
        False,
        description="Begin the answer with the last message, if an assistant said it.",
        json_schema_extra=different("only assistant messages are repeated"),
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
    documents: Annotated[list[JsonObject], Field(max_length=limits.MAX_PARTS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = Field(
        None, json_schema_extra=different("functions only")
    )
    tool_choice: ToolChoice | None = Field(
        None, description="Default: auto if there are tools, else none."
    )
    parallel_tool_calls: bool | None = Field(
        True, description="Whether an answer may hold more than one call."
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEMPLATE)] | None = (
        Field(
            None,
            description="Instead of the model's, where the operator allows it.",
            json_schema_extra=CHAT_TEMPLATE,
        )
    )
    include_reasoning: bool | None = Field(
        True, description="Whether the answer shows the reasoning; it is generated in any case."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="Passed to the chat template under this name."
    )
    verbosity: Verbosity | None = Field(
        None,
        description="Passed to the chat template under this name; few templates use it.",
        json_schema_extra=different("passed to the chat template; few templates use it"),
    )
    thinking: ThinkingSwitch | None = Field(
        None,
        description="Passed to the chat template as enable_thinking and thinking.",
        json_schema_extra=different("passed to the chat template: enable_thinking and thinking"),
    )
    thinking_token_budget: Alternatives | None = Field(
        None,
        description="Reasoning that comes so far is ended; -1: when the tokens to generate are.",
        json_schema_extra=different("counts the start tag too; 0 counts as 1"),
    )
    functions: Annotated[list[JsonObject], Field(max_length=limits.MAX_TOOLS)] | None = Field(
        None,
        description="Refused; use tools.",
        json_schema_extra=extra("refused", "use tools instead", example=[{"name": "f"}]),
    )
    function_call: str | JsonObject | None = Field(
        None,
        description="Refused; use tool_choice.",
        json_schema_extra=extra("refused", "use tool_choice instead", example="auto"),
    )

    undeclared: ClassVar[Rows] = {
        **refused(
            "the rendered prompt is not shown; /tokenize and /detokenize do",
            "return_prompt_text", False,
        ),
        **refused("ask for n choices", "best_of", 1),
        **refused("answers are texts", "audio"),
        **refused("answers are texts", "modalities", ["text"]),
        **refused("the server does not search", "web_search_options"),
        **refused("nothing is moderated", "moderation"),
        **refused("answers are not kept", "store", False),
        **refused("use max_completion_tokens", "max_output_tokens"),
        **ignored("only makes answers come faster", "prediction"),
    }  # fmt: skip


class ChatCompletionRequest(ChatFields):
    """Generate the next turn of a conversation."""

    messages: Messages


_ONE_BY_ONE = "/v1/chat/completions has it, for one conversation"


class BatchChatRequest(ChatFields):
    """Generate the next turn of each of several conversations."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=limits.MAX_SEQUENCES)] = (
        Field(json_schema_extra=different("a list of conversations; vLLM's endpoint"))
    )

    undeclared: ClassVar[Rows] = {
        **refused(_ONE_BY_ONE, "stream use_beam_search echo continue_final_message", False),
        **refused(_ONE_BY_ONE, "stream_options prompt_logprobs tools tool_choice chat_template"),
        **refused(_ONE_BY_ONE, "kv_transfer_params"),
        "n": Row("refused", "each conversation has one choice", (1,), 2),
    }
    """Some of these are declared as fields: their values are validated before the refusal."""


class TopLogprob(msgspec.Struct):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One token of the answer with its alternatives, most likely first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of the answer's tokens."""

    content: list[ChatLogprob]
    refusal: list[ChatLogprob] | None = None


class AssistantMessage(msgspec.Struct):
    """The complete assistant message."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    """Alias of `reasoning_content`: clients use either name. Null: a reasoning model wrote none."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One generated answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReasonField = None
    token_ids: OptionalTokenIds = None
    unreadable_tool_calls: list[int] | UnsetType = UNSET
    """Indices of calls whose arguments are not a JSON object, if any."""


class ChatCompletionResponse(msgspec.Struct):
    """A complete response with all choices."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: OptionalTokenIds = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | UnsetType = UNSET
    """With --enable-per-request-metrics."""
    kv_transfer_params: RemoteKvBlocks | UnsetType | None = UNSET


class ChatDelta(msgspec.Struct):
    """The new part of an answer; the first delta has the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """The part of a choice in one chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReasonField = None
    token_ids: OptionalTokenIds = UNSET
    unreadable_tool_calls: list[int] | UnsetType = UNSET
    """In the last chunk: indices of calls whose arguments are not a JSON object, if any."""


class ChatCompletionChunk(msgspec.Struct):
    """One event of a stream; the event with usage has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: OptionalTokenIds = UNSET
    """With return_token_ids, in the first chunk of each choice."""
