"""Messages as clients see them: events of a stream, or one body."""

from collections.abc import Callable, Sequence

import msgspec

from server.answer.parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
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
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from server.api.messages.schema import MessagesRequest
from server.api.rendering import Renderer, WholeBody, event_frames
from server.errors import ApiError, MessagesErrorResponse, message_error
from server.generate.fold import Delta
from server.generate.request import GenerationRequest
from server.schema.answer import Usage
from server.text.detokenizer import TokenTable

_encode = msgspec.json.Encoder().encode


def renderer(body: MessagesRequest, request: GenerationRequest, _: TokenTable) -> Renderer:
    """Return what shows the answer to a request."""
    growing = GrowingMessage(request)
    return MessageEvents(growing) if body.stream else MessageBody(growing)


class BlockBuilder:
    """Builds the content of one message; a state machine without I/O. One block is open at a time.

    Args:
        new_call_id: makes the name of a call.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._open: ContentBlock | None = None
        self._text: list[str] = []
        self.content: list[ContentBlock] = []

    def push(self, part: Part) -> list[MessageEvent]:
        """Add a part; return what there is to tell."""
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

    def close(self, parts: Sequence[Part]) -> list[MessageEvent]:
        """Add the last parts and end; return what there is to tell."""
        return [event for part in parts for event in self.push(part)] + self.finish()

    def finish(self) -> list[MessageEvent]:
        """End the block that is open, if one is; return what there is to tell."""
        block = self._open
        if block is None:
            return []
        text, self._text = "".join(self._text), []
        match block:
            case TextContent():
                block.text = text
            case ThinkingContent():
                block.thinking = text
            case ToolUseContent():
                block.input = _object(text)
        self._open = None
        return [BlockStop(len(self.content) - 1)]

    def _more(self, text: str, delta: ContentDelta) -> MessageEvent:
        self._text.append(text)
        return BlockDelta(len(self.content) - 1, delta)

    def _switch(self, block: ContentBlock) -> list[MessageEvent]:
        told = self.finish()
        self._open = block
        self.content.append(block)
        return [*told, BlockStart(len(self.content) - 1, msgspec.structs.replace(block))]


def _object(text: str) -> msgspec.Raw | dict[str, object]:
    """Return the JSON of a call's input; what was cut off, or is no object, is none."""
    try:
        decoded = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return {}
    return msgspec.Raw(text.encode()) if isinstance(decoded, dict) else {}


class GrowingMessage:
    """Fills a message from deltas, and tells how it grows as typed events."""

    def __init__(self, request: GenerationRequest) -> None:
        self.message = Message(
            id=f"msg_{request.request_id}",
            model=request.model,
            usage=MessageUsage(request.num_prompt_tokens, 1),
        )
        self._reader = request.plan.reader()
        self._builder = BlockBuilder(request.plan.new_call_id)

    def push(self, delta: Delta) -> list[MessageEvent]:
        """Add what is new of the answer; return what there is to tell."""
        return [event for part in self._taken_apart(delta) for event in self._builder.push(part)]

    def close(self, usage: Usage, answer: Delta | None = None) -> list[MessageEvent]:
        """Complete the message, with a whole answer if it has none yet.

        Returns what there is to tell of what is new.
        """
        told = self._builder.close([] if answer is None else self._taken_apart(answer))
        message = self.message
        message.content = self._builder.content
        message.usage = _usage(usage)
        calls = [block.id for block in message.content if isinstance(block, ToolUseContent)]
        if self._reader is not None and (unreadable := self._reader.unreadable_calls):
            message.unreadable_tool_use = [calls[index] for index in unreadable]
        if calls and message.stop_reason == "end_turn":
            message.stop_reason = "tool_use"
        return told

    def _taken_apart(self, piece: Delta) -> list[Part]:
        parts: list[Part]
        if self._reader is None:
            parts = [ContentText(piece.text)] if piece.text else []
        else:
            parts = self._reader.push(piece.text, piece.token_ids)
            if piece.finish_reason is not None:
                parts += self._reader.finish()
        if piece.finish_reason is not None:
            self._end_with(piece)
        return parts

    def _end_with(self, piece: Delta) -> None:
        message = self.message
        if piece.finish_reason == "abort":
            message.stop_reason = None
        else:
            message.stop_reason = "max_tokens" if piece.finish_reason == "length" else "end_turn"
        if isinstance(piece.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", piece.stop_reason


class MessageBody(WholeBody):
    """Shows the sum of deltas as one message."""

    def __init__(self, growing: GrowingMessage) -> None:
        super().__init__(1)
        self._growing = growing

    def finish(self, usage: Usage) -> bytes:
        """Return the body."""
        self._growing.close(usage, self.answers()[0])
        return _encode(self._growing.message)


class MessageEvents:
    """Shows deltas as events."""

    streams, large = True, False

    def __init__(self, growing: GrowingMessage) -> None:
        self._growing = growing
        self._begun = False

    def push(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta."""
        begin: list[MessageEvent] = [] if self._begun else [MessageStart(self._growing.message)]
        self._begun = True
        return event_frames([*begin, *self._growing.push(delta)])

    def finish(self, usage: Usage) -> bytes:
        """Return the frames behind those of the last delta."""
        told, message = self._growing.close(usage), self._growing.message
        ending = Ending(message.stop_reason, message.stop_sequence, message.unreadable_tool_use)
        return event_frames([*told, MessageDelta(ending, message.usage), MessageStop()])

    def error(self, error: ApiError) -> bytes:
        """Return the last frame of a stream in which something went wrong."""
        return event_frames([MessagesErrorResponse(message_error(error))])


def _usage(usage: Usage) -> MessageUsage:
    details = usage.prompt_tokens_details
    cached = 0 if isinstance(details, msgspec.UnsetType) else details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
