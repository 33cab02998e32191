"""How answers are shown: what an endpoint's renderers are made from, and what they do."""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from server.api.shared.answer import Usage
from server.generate.fold import Delta
from server.generate.specification import GenerationSpec
from server.http.errors import ApiError
from server.text.detokenizer import TokenTable

_encode = msgspec.json.Encoder().encode


class Answering(msgspec.Struct, frozen=True):
    """An answer that begins now."""

    request_id: str
    model: str
    """The name by which the client called it."""
    created: int
    """Unix time."""
    spec: GenerationSpec
    table: TokenTable
    force_usage: bool
    """Whether every stream ends with its usage."""


def event_frames(events: Iterable[msgspec.Struct]) -> bytes:
    """Return the frames of typed events, which are named by their tags."""
    frames = []
    for event in events:
        tag = str(event.__struct_config__.tag).encode()
        frames.append(b"event: %b\ndata: %b\n\n" % (tag, _encode(event)))
    return b"".join(frames)


class Renderer(Protocol):
    """Shows the answers to one request, as a stream of events or as one body.

    A state machine without I/O: deltas go in, bytes for the client come out. That of a whole answer
    returns nothing until its end.
    """

    @property
    def streams(self) -> bool:
        """Whether this is a stream."""
        ...

    @property
    def large(self) -> bool:
        """Whether `finish` takes more than a moment."""
        ...

    def push(self, index: int, delta: Delta) -> bytes:
        """Add a delta of a sequence; return the frames that show it."""
        ...

    def finish(self, usage: Usage) -> bytes:
        """End: return the last frames, or the whole body."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the last frames of a stream in which something went wrong."""
        ...
