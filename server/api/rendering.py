"""What the renderers of all endpoints do, and what they have in common."""

from typing import Protocol

from msgspec import UNSET, UnsetType

from server.errors import ApiError
from server.generate.answer import DeltaSum
from server.generate.fold import Delta
from server.generate.request import GenerationRequest
from server.schema.answer import RequestMetrics, Usage
from server.schema.kv_transfer import KvHandedOn

_LARGE = 2000
"""Tokens and scores of answers from which on JSON is made beside the event loop."""


def timing_shown(request: GenerationRequest, usage: Usage) -> RequestMetrics | UnsetType:
    """Return how long the whole answer took, if that is shown and an engine has said so."""
    timing, tokens = request.timing, usage.completion_tokens
    if timing is None or not request.shows_timing:
        return UNSET
    ran = timing.prefill + timing.decode
    return RequestMetrics(
        time_to_first_token_ms=timing.prefill * 1000,
        generation_time_ms=timing.decode * 1000,
        queue_time_ms=timing.queue * 1000,
        mean_itl_ms=timing.decode * 1000 / (tokens - 1) if tokens > 1 else None,
        tokens_per_second=tokens / ran if ran > 0 else None,
    )


def transfer_shown(request: GenerationRequest) -> KvHandedOn | UnsetType | None:
    """Return what the answer says of KV blocks that are offered, if that was asked for."""
    return UNSET if request.handed_on is None else request.handed_on()


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


class WholeBody:
    """What renderers of whole answers have in common: the sums of all sequences of a request."""

    streams = False

    def __init__(self, count: int) -> None:
        """Sum up the deltas of `count` sequences."""
        self._sums = [DeltaSum() for _ in range(count)]

    def push(self, index: int, delta: Delta) -> bytes:
        """Add a delta of a sequence; there is nothing to show of it yet."""
        self._sums[index].add(delta)
        return b""

    @property
    def large(self) -> bool:
        """Whether `finish` takes more than a moment."""
        return sum([one.size for one in self._sums]) > _LARGE

    def answers(self) -> list[Delta]:
        """Return all answers in order, and forget them."""
        sums, self._sums = self._sums, []
        return [one.whole() for one in sums]

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error."""
        return error.body()
