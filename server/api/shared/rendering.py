"""How answers are shown: what an endpoint's renderers are made from, and what they do."""

from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from engine.shared.messages import RequestTiming
from server.api.shared.answer import RequestMetrics, Usage
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
    timed: "TimedLater | None" = None
    """What is timed, if that is to be shown."""

    def metrics(self, usage: Usage) -> RequestMetrics | UnsetType:
        """Return how long the whole answer took, if that is shown and an engine has said so."""
        timing = None if self.timed is None else self.timed.timing
        return UNSET if timing is None else request_metrics(timing, usage.completion_tokens)


class Timed(Protocol):
    """What runs an answer."""

    @property
    def timing(self) -> RequestTiming | None:
        """How long it took in engines."""
        ...


class TimedLater:
    """Stands for what will run an answer, which is made after whatever shows it."""

    def __init__(self) -> None:
        self.by: Timed | None = None

    @property
    def timing(self) -> RequestTiming | None:
        """How long it took in engines."""
        return None if self.by is None else self.by.timing


def request_metrics(timing: RequestTiming, tokens: int) -> RequestMetrics:
    """Return what an answer of so many tokens shows of its times."""
    ran = timing.prefill + timing.decode
    return RequestMetrics(
        time_to_first_token_ms=timing.prefill * 1000,
        generation_time_ms=timing.decode * 1000,
        queue_time_ms=timing.queue * 1000,
        mean_itl_ms=timing.decode * 1000 / (tokens - 1) if tokens > 1 else None,
        tokens_per_second=tokens / ran if ran > 0 else None,
    )


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
