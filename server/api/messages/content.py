"""POST /v1/messages: the message, and the events that tell how it grows."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.errors import MessagesErrorResponse

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """What the model says."""

    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought before; nothing is signed."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the client is asked to make."""

    id: str
    name: str
    input: dict[str, Any] | msgspec.Raw


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(msgspec.Struct):
    """Token counts; cached tokens are not among `input_tokens`."""

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
    """Ids of calls whose input is no JSON object, if there are any: `{}` stands for it."""


class TokenCount(msgspec.Struct):
    """Tokens of a conversation."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: ContentBlock


class MessageTextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class MessageThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of what the model thinks."""

    thinking: str


class MessageInputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


ContentDelta = MessageTextDelta | MessageThinkingDelta | MessageInputDelta


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: ContentDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class Ending(msgspec.Struct):
    """How the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None
    unreadable_tool_use: list[str] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The message is complete; the usage is that of all of it."""

    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
    | MessagesErrorResponse
)  # fmt: skip
