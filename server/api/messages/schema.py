"""POST /v1/messages and /v1/messages/count_tokens: the requests.

Source: Anthropic's Messages API, version 2023-06-01.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag

from server import limits
from server.errors import MessagesErrorResponse
from server.schema.body import JsonObject, Name, RequestBody, Tokens, type_of
from server.schema.fields import CacheSalt
from server.schema.support import NO_KV_TRANSFER, PRIORITY, Rows, different, extra, ignored, refused


class TextBlock(RequestBody):
    """Text of a message, the system prompt or a tool result."""

    type: Literal["text"]
    text: str


class ThinkingBlock(RequestBody):
    """Reasoning of an earlier answer; the signature is not verified."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestBody):
    """Accepted but dropped: its content is opaque."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(RequestBody):
    """A tool call that the model made earlier."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: JsonObject | str | None = Field(
        None, description="An object. Other text is shown to the model as it is."
    )


class ImageBlockSource(RequestBody):
    """Source of an image: inline in `data`, or a `url` that the operator allows."""

    type: Name
    media_type: Name | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(RequestBody):
    """An image; without image support refused in user turns and dropped from tool results."""

    type: Literal["image"]
    source: ImageBlockSource | None = None


class DocumentSource(RequestBody):
    """Source of a document; only `text` is supported."""

    type: Name
    data: str | None = None


class DocumentBlock(RequestBody):
    """A document; plain text is included in the prompt, other types are handled like images."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None


class SearchResultBlock(RequestBody):
    """A passage from a search result."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=limits.MAX_PARTS)]


class ToolReferenceBlock(RequestBody):
    """A tool found by a tool search; the model sees all tools in any case."""

    type: Literal["tool_reference"]
    tool_name: Name


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")],
    Discriminator(type_of),
]


class ToolResultBlock(RequestBody):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[ResultBlock], Field(max_length=limits.MAX_PARTS)] | None = None
    is_error: bool | None = False


class HostedBlock(RequestBody):
    """Accepted but dropped: a call that another server ran, or its result."""

    type: Name


class ToolReference(RequestBody):
    """A tool of the request's `tools`."""

    type: Literal["tool_reference"]
    name: Name


class ToolChangeBlock(RequestBody):
    """From here on, a tool can be called, or no longer.

    The model sees all tools of the request, except those whose last change is their removal.
    """

    type: Literal["tool_addition", "tool_removal"]
    tool: ToolReference


class CompactionBlock(RequestBody):
    """A summary of the conversation before it; without `content`, of nothing."""

    type: Literal["compaction"]
    content: str | None = None
    encrypted_content: str | None = None


def _block_type(block: Any) -> str:
    kind = type_of(block)
    if kind in ("mcp_tool_use", "mcp_tool_listing") or (
        kind != "tool_result" and kind.endswith("_tool_result")
    ):
        return "server_tool_use"
    return "tool_addition" if kind == "tool_removal" else kind


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[HostedBlock, Tag("server_tool_use")]
    | Annotated[ToolChangeBlock, Tag("tool_addition")]
    | Annotated[CompactionBlock, Tag("compaction")],
    Discriminator(_block_type),
]


class Turn(RequestBody):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=limits.MAX_PARTS)]


class MessageTool(RequestBody):
    """A function that the model can call.

    Tools of other types are dropped, or refused if `tool_choice` requires them.
    """

    name: Name
    type: Name | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


class MessageToolChoice(RequestBody):
    """Whether and which tools must be called; `any` corresponds to "required" elsewhere."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = False


class Thinking(RequestBody):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = None
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted leaves the text of thinking out; nothing is summarized."
    )


class OutputFormat(RequestBody):
    """JSON schema that constrains the text of the answer."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestBody):
    """Format of the answer, and reasoning effort."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(RequestBody):
    """Identifies the end user."""

    user_id: Name | None = None


class _Conversation(RequestBody):
    """Fields common to both endpoints."""

    model: str = Field(description="One of the served names.")
    messages: Annotated[list[Turn], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(max_length=limits.MAX_PARTS)] | None = None
    tools: Annotated[list[MessageTool], Field(max_length=limits.MAX_TOOLS)] | None = Field(
        None,
        json_schema_extra=different(
            "functions only; other tools are ignored, or refused if tool_choice requires them"
        ),
    )
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = Field(
        None,
        json_schema_extra=different("models that always reason still do; there are no signatures"),
    )
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="An older name for output_config.format."
    )
    mcp_servers: Annotated[list[JsonObject], Field(max_length=limits.MAX_TOOL_CALLS)] | None = (
        Field(
            None,
            description="Refused: this server runs no tools.",
            json_schema_extra=extra(
                "refused", "this server runs no tools", [], example=[{"url": "http://localhost"}]
            ),
        )
    )
    context_management: JsonObject | None = Field(
        None,
        description="Accepted but not used: conversations are used exactly as sent.",
        json_schema_extra=extra("ignored", "conversations are used exactly as sent"),
    )
    chat_template_kwargs: JsonObject | None = None

    undeclared: ClassVar[Rows] = {
        **ignored(
            "a hint for caches of other servers; prompts are cached in any case", "cache_control"
        ),
        **refused("conversations are not summarized", "compaction"),
        **ignored("has no effect", "billing_policy"),
        **ignored("there is one tier", "speed"),
    }


class CountTokensRequest(_Conversation):
    """Count the tokens of a conversation's prompt."""


class MessagesRequest(_Conversation):
    """Generate the next turn of a conversation."""

    max_tokens: Tokens
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]],
            Field(max_length=limits.MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    stream: bool | None = False
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy. Default: the model's, else 1."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Default: the model's, else 1.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 mean all tokens.")
    metadata: Metadata | None = Field(
        None, json_schema_extra=different("`user_id` corresponds to `user` of the other endpoints")
    )
    container: str | JsonObject | None = Field(
        None,
        description="Refused: this server runs no tools.",
        json_schema_extra=extra("refused", "this server runs no tools", example="container_1"),
    )
    service_tier: Name | None = Field(
        None,
        description="Accepted but not used.",
        json_schema_extra=extra("ignored", "there is only one tier"),
    )

    seed: int | None = Field(None, ge=limits.INT64_MIN, le=limits.INT64_MAX)
    priority: int | None = Field(0, ge=-(2**31), lt=2**31, json_schema_extra=PRIORITY)
    cache_salt: CacheSalt | None = None

    undeclared: ClassVar[Rows] = {
        **refused("conversations are not kept here; /v1/responses keeps them", "thread"),
        **NO_KV_TRANSFER,
        **ignored("there is one tier", "inference_geo"),
        **ignored("has no effect", "fallback_credit_token"),
        **ignored("no model here declines a request that another would take", "fallbacks"),
        **ignored("about caches, which are no part of the answer", "diagnostics"),
    }

    @property
    def request_id(self) -> str | None:
        """Always None: the request ID comes from the header."""
        return None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning before the answer; the signature is empty."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call for the client to run."""

    id: str
    name: str
    input: dict[str, Any] | msgspec.Raw


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(msgspec.Struct):
    """Token counts; `input_tokens` excludes cached tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """The model's answer."""

    id: str
    model: str
    role: Literal["assistant"] = "assistant"
    content: list[ContentBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    unreadable_tool_use: list[str] | UnsetType = UNSET
    """IDs of calls whose input was not a JSON object and was replaced by `{}`, if any."""


class TokenCount(msgspec.Struct):
    """Number of tokens in a conversation's prompt."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """Start of a content block."""

    index: int
    content_block: ContentBlock


class MessageTextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """New text of a text block."""

    text: str


class MessageThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """New text of a thinking block."""

    thinking: str


class MessageInputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """New text of a call's JSON input."""

    partial_json: str


ContentDelta = MessageTextDelta | MessageThinkingDelta | MessageInputDelta


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """New content of a block."""

    index: int
    delta: ContentDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """End of a content block."""

    index: int


class Ending(msgspec.Struct):
    """Why the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None
    unreadable_tool_use: list[str] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """End of the message, with usage for the whole of it."""

    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
    | MessagesErrorResponse
)  # fmt: skip
