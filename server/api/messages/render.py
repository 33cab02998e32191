"""Messages as clients see them: events of a stream, or one body."""

import msgspec

from server.answer.parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from server.api.growing import Growing, GrowingBody
from server.api.messages.content import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    ContentDelta,
    Ending,
    Message,
    MessageDelta,
    MessageEvent,
    MessageInputDelta,
    MessageStart,
    MessageStop,
    MessageTextDelta,
    MessageThinkingDelta,
    MessageUsage,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from server.api.messages.schema import MessagesRequest
from server.api.rendering import Renderer
from server.errors import ApiError, MessagesErrorResponse, message_error
from server.generate.fold import Delta
from server.generate.request import GenerationRequest
from server.schema.answer import Usage
from server.text.detokenizer import TokenTable


def renderer(body: MessagesRequest, request: GenerationRequest, _: TokenTable) -> Renderer:
    """Return what shows the answer to a request."""
    growing = GrowingMessage(request)
    return growing if body.stream else GrowingBody(growing)


class GrowingMessage(Growing[Message, ContentBlock, MessageEvent]):
    """Fills a message block by block."""

    def __init__(self, request: GenerationRequest) -> None:
        message = Message(
            id=f"msg_{request.request_id}",
            model=request.model,
            usage=MessageUsage(request.num_prompt_tokens, 1),
        )
        super().__init__(message, request.plan)

    def _begin(self) -> list[MessageEvent]:
        return [MessageStart(self.answer)]

    def _ends(self, delta: Delta) -> None:
        message = self.answer
        reasons: dict[str | None, StopReason | None] = {"abort": None, "length": "max_tokens"}
        message.stop_reason = reasons.get(delta.finish_reason, "end_turn")
        if isinstance(delta.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", delta.stop_reason

    def _end(self) -> list[MessageEvent]:
        message = self.answer
        ending = Ending(message.stop_reason, message.stop_sequence, message.unreadable_tool_use)
        return [MessageDelta(ending, message.usage), MessageStop()]

    def _failed(self, error: ApiError) -> MessageEvent:
        return MessagesErrorResponse(message_error(error))

    def _add(self, part: Part) -> list[MessageEvent]:
        match part:
            case ReasoningText(text):
                begun = isinstance(self._open, ThinkingContent)
                told = [] if begun else self._switch(ThinkingContent(""))
                return [*told, self._more(text, MessageThinkingDelta(text))]
            case ContentText(text):
                told = [] if isinstance(self._open, TextContent) else self._switch(TextContent(""))
                return [*told, self._more(text, MessageTextDelta(text))]
            case CallBegin(_, name):
                return self._switch(ToolUseContent(self._new_call_id(), name, {}))
            case CallArguments(_, text):
                return [self._more(text, MessageInputDelta(text))]

    def _more(self, text: str, delta: ContentDelta) -> MessageEvent:
        self._text.append(text)
        return BlockDelta(len(self.items) - 1, delta)

    def _opened(self, index: int, item: ContentBlock) -> MessageEvent:
        return BlockStart(index, item)

    def _closed(self, index: int, item: ContentBlock, text: str) -> list[MessageEvent]:
        match item:
            case TextContent():
                item.text = text
            case ThinkingContent():
                item.thinking = text
            case ToolUseContent():
                item.input = _object(text)
        return [BlockStop(index)]

    def _complete(self, usage: Usage) -> list[MessageEvent]:
        told, message = self._close_item(), self.answer
        message.content = self.items
        message.usage = _usage(usage)
        calls = [block.id for block in message.content if isinstance(block, ToolUseContent)]
        if self._reader is not None and (unreadable := self._reader.unreadable_calls):
            message.unreadable_tool_use = [calls[index] for index in unreadable]
        if calls and message.stop_reason == "end_turn":
            message.stop_reason = "tool_use"
        return told


def _object(text: str) -> msgspec.Raw | dict[str, object]:
    """Return the JSON of a call's input; what was cut off, or is no object, is none."""
    try:
        decoded = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return {}
    return msgspec.Raw(text.encode()) if isinstance(decoded, dict) else {}


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
