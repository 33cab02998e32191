"""Conversations in requests: turns, and the parts that their contents consist of."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from server.access.limits import MAX_PARTS, MAX_TOOL_CALLS
from server.api.shared.body import JsonObject, Name, RequestBody, part_type
from server.api.shared.tools import ToolCallTurn


class TextPart(RequestBody):
    """A piece of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class RefusalPart(RequestBody):
    """A piece of an assistant's message that said no."""

    type: Literal["refusal"]
    refusal: str


MessagePart = Annotated[
    Annotated[TextPart, Tag("a text")] | Annotated[RefusalPart, Tag("a refusal")],
    Discriminator(part_type),
]


class ChatMessage(RequestBody):
    """One turn. What a template may read beyond role and content is passed to it as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[MessagePart], Field(max_length=MAX_PARTS)] | None = None
    refusal: str | None = Field(None, description="What an assistant said instead of content.")
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name for reasoning_content.")
    tool_calls: Annotated[list[ToolCallTurn], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None
    function_call: JsonObject | None = Field(None, description="Refused; use tool_calls.")
