"""From the parts of an answer to blocks, and to the events that tell how they grow."""

from collections.abc import Callable, Sequence

import msgspec

from server.answer.parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from server.api.messages.content import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    ContentDelta,
    MessageEvent,
    MessageInputDelta,
    MessageTextDelta,
    MessageThinkingDelta,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)


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
