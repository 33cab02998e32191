"""POST /v1/messages: the message as a whole, and as the events that tell how it grows."""

from collections.abc import Sequence

import msgspec

from server.answer.parts import ContentText, Part
from server.answer.plan import AnswerPlan
from server.api.messages.blocks import BlockBuilder
from server.api.messages.content import (
    Ending,
    Message,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
)
from server.api.shared.fields import Usage
from server.generate.fold import Answer, Delta
from server.http.errors import ApiError, MessagesErrorResponse, message_error

_encode = msgspec.json.Encoder().encode


class MessageStream:
    """Fills a message from deltas, and shows how it grows as typed events.

    Args:
        message: the message as it is before there is any content.
        plan: how the answer is taken apart.
    """

    def __init__(self, message: Message, plan: AnswerPlan) -> None:
        self.message = message
        self._reader = plan.reader()
        self._builder = BlockBuilder(plan.new_call_id)
        self._begun = False

    def write(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta."""
        begin: list[MessageEvent] = [] if self._begun else [MessageStart(self.message)]
        self._begun = True
        return _frames([*begin, *self.push(delta)])

    def push(self, piece: Delta | Answer) -> list[MessageEvent]:
        """Add what is new of the answer; return what there is to tell."""
        parts: list[Part]
        if self._reader is None:
            parts = [ContentText(piece.text)] if piece.text else []
        else:
            parts = self._reader.push(piece.text, piece.token_ids)
            if piece.finish_reason is not None:
                parts += self._reader.finish()
        if piece.finish_reason is not None:
            self._end_with(piece)
        return [event for part in parts for event in self._builder.push(part)]

    def close(self, usage: Usage) -> list[MessageEvent]:
        """Complete the message; return what there is to tell of its last block."""
        told = self._builder.finish()
        message = self.message
        message.content = self._builder.content
        message.usage = _usage(usage)
        if self._builder.has_calls and message.stop_reason == "end_turn":
            message.stop_reason = "tool_use"
        return told

    def end(self, usage: Usage) -> bytes:
        """Return the frames behind those of the last delta."""
        told = self.close(usage)
        ending = Ending(self.message.stop_reason, self.message.stop_sequence)
        return _frames([*told, MessageDelta(ending, self.message.usage), MessageStop()])

    def error(self, error: ApiError) -> bytes:
        """Return the last frame of a stream in which something went wrong."""
        return _frames([MessagesErrorResponse(message_error(error))])

    def _end_with(self, piece: Delta | Answer) -> None:
        message = self.message
        if piece.finish_reason == "abort":
            message.stop_reason = None
        else:
            message.stop_reason = "max_tokens" if piece.finish_reason == "length" else "end_turn"
        if isinstance(piece.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", piece.stop_reason


def _usage(usage: Usage) -> MessageUsage:
    details = usage.prompt_tokens_details
    cached = 0 if isinstance(details, msgspec.UnsetType) else details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _frames(told: Sequence[MessageEvent]) -> bytes:
    frames = []
    for event in told:
        name = str(type(event).__struct_config__.tag).encode()
        frames.append(b"event: %b\ndata: %b\n\n" % (name, _encode(event)))
    return b"".join(frames)
