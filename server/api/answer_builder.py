"""Answers of typed items (responses and messages), which grow with each delta and emit events."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from server.answer.parts import ContentText, Part
from server.answer.reader import AnswerPlan
from server.api.rendering import WholeBody
from server.errors import ApiError
from server.generate.fold import Delta, FinishReason
from server.schema.answer import Usage

Item = TypeVar("Item", bound=msgspec.Struct)
Event = TypeVar("Event", bound=msgspec.Struct)
Answer = TypeVar("Answer", bound=msgspec.Struct)

_encode = msgspec.json.Encoder().encode


class AnswerBuilder(ABC, Generic[Answer, Item, Event]):
    """Builds an answer from deltas and renders its growth as a stream of events.

    A state machine without I/O. One item is open at a time; its text is stored in it when it
    closes.
    """

    streams, large = True, False

    def __init__(self, answer: Answer, plan: AnswerPlan) -> None:
        """Start with `answer` as it is before any output."""
        self.answer = answer
        self.items: list[Item] = []
        self._reader = plan.reader()
        self._new_call_id = plan.new_call_id
        self._open: Item | None = None
        self._text: list[str] = []
        """Text of the open item so far."""
        self._last: list[Event] | None = None
        """Closing events of the last item, once the answer is complete."""
        self._begun = False
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def push(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta."""
        emitted = self._grow(delta)
        if not self._begun:
            self._begun, emitted = True, [*self._begin(), *emitted]
        return self.frames(emitted)

    def complete(self, usage: Usage) -> Answer:
        """Return the complete answer; no further deltas may follow."""
        if self._last is None:
            self._last = self._complete(usage)
        return self.answer

    def finish(self, usage: Usage) -> bytes:
        """Return the frames that follow the last delta."""
        self.complete(usage)
        return self.frames([*(self._last or ()), *self._end()])

    def error(self, error: ApiError) -> bytes:
        """Return the last frame of a stream that failed."""
        return self.frames([self._failed(error)])

    def whole(self, usage: Usage, delta: Delta) -> Answer:
        """Return the answer that consists of one delta."""
        self._grow(delta)
        return self.complete(usage)

    def frames(self, emitted: Sequence[Event]) -> bytes:
        """Return the frames of the next events of the stream."""
        return event_frames(emitted)

    def _grow(self, delta: Delta) -> list[Event]:
        """Add a delta to the answer; return the events that describe it."""
        self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        return [event for part in self._parse(delta) for event in self._add(part)]

    @abstractmethod
    def _begin(self) -> list[Event]:
        """Return the first events of a stream."""

    @abstractmethod
    def _end(self) -> list[Event]:
        """Return the last events of a stream, after those of the last item."""

    @abstractmethod
    def _failed(self, error: ApiError) -> Event:
        """Return the last event of a stream that failed."""

    @abstractmethod
    def _add(self, part: Part) -> list[Event]:
        """Add a part of the answer; return the events that describe it."""

    @abstractmethod
    def _opened(self, index: int, item: Item) -> Event:
        """Return the event for the start of an item."""

    @abstractmethod
    def _closed(self, index: int, item: Item, text: str) -> list[Event]:
        """Store an item's full text in it; return the events that close it."""

    @abstractmethod
    def _complete(self, usage: Usage) -> list[Event]:
        """Close the open item and complete the answer; return the item's closing events."""

    def _parse(self, piece: Delta) -> list[Part]:
        if self._reader is None:
            return [ContentText(piece.text)] if piece.text else []
        parts = self._reader.push(piece.text, piece.token_ids)
        return parts if piece.finish_reason is None else parts + self._reader.finish()

    def _switch(self, item: Item) -> list[Event]:
        """Close the open item and open this one."""
        emitted = self._close_item()
        self._open = item
        self.items.append(item)
        return [*emitted, self._opened(len(self.items) - 1, msgspec.structs.replace(item))]

    def _close_item(self) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        text, self._text = "".join(self._text), []
        return self._closed(len(self.items) - 1, item, text)


def event_frames(events: Iterable[msgspec.Struct]) -> bytes:
    """Return the frames of typed events; the event name is the tag."""
    frames = []
    for event in events:
        tag = str(event.__struct_config__.tag).encode()
        frames.append(b"event: %b\ndata: %b\n\n" % (tag, _encode(event)))
    return b"".join(frames)


class BuiltBody(WholeBody, Generic[Answer]):
    """Renders accumulated deltas as one answer."""

    def __init__(
        self,
        builder: AnswerBuilder[Answer, Any, Any],
        show: Callable[[Answer], msgspec.Struct] = lambda answer: answer,
    ) -> None:
        """`show` converts the answer to the response body."""
        super().__init__(1)
        self._builder = builder
        self._show = show
        self._answer: Answer | None = None

    def complete(self, usage: Usage) -> Answer:
        """Return the complete answer; no further deltas may follow."""
        if self._answer is None:
            self._answer = self._builder.whole(usage, self.answers()[0])
        return self._answer

    def finish(self, usage: Usage) -> bytes:
        """Return the response body."""
        return _encode(self._show(self.complete(usage)))
