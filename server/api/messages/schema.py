"""POST /v1/messages and /v1/messages/count_tokens: the requests.

Source: Anthropic's Messages API, version 2023-06-01.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from server.access.limits import (
    INT64_MAX,
    INT64_MIN,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
)
from server.api.shared.body import JsonObject, Name, RequestBody
from server.api.shared.fields import CacheSalt


class TextBlock(RequestBody):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str


class ThinkingBlock(RequestBody):
    """What the model thought before its answer; the signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestBody):
    """Accepted and left out: nothing can be read from it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(RequestBody):
    """A call that the model made before."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: JsonObject


class ToolResultBlock(RequestBody):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = False


def _block_type(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) else ""


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_block_type),
]


class Turn(RequestBody):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS)]


class MessageTool(RequestBody):
    """A function that the model may call; tools that a server runs are refused."""

    name: Name
    type: Name | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


class MessageToolChoice(RequestBody):
    """Whether tools are called, and which; `any` is what others name required."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(RequestBody):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted leaves the text of thinking out; nothing is summarized."
    )


class OutputFormat(RequestBody):
    """A schema that the text of the answer fits."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestBody):
    """The form of the answer, and how much thought goes into it."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(RequestBody):
    """Whose request it is."""

    user_id: Name | None = None


class _Conversation(RequestBody):
    """What both endpoints take."""

    model: str = Field(description="One of the served names.")
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="An older name for output_config.format."
    )
    mcp_servers: Annotated[list[JsonObject], Field(max_length=MAX_TOOL_CALLS)] | None = Field(
        None, description="Refused: no tools run here."
    )
    context_management: JsonObject | None = Field(
        None, description="Refused: conversations are read as they are sent."
    )
    chat_template_kwargs: JsonObject | None = None


class CountTokensRequest(_Conversation):
    """Count the tokens of a conversation as the model would read it."""


class MessagesRequest(_Conversation):
    """Write the next turn of a conversation."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
            Field(max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    stream: bool | None = False
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy. Default: the model's, else 1."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Default: the model's, else 1.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 mean all tokens.")
    metadata: Metadata | None = None
    container: str | JsonObject | None = Field(None, description="Refused: no tools run here.")
    service_tier: Name | None = Field(None, description="Accepted and not used.")

    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    priority: int | None = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: CacheSalt | None = None

    @property
    def request_id(self) -> str | None:
        """None: the header names the request."""
        return None
