"""Events of a background response: stored as they are generated, streamed to following clients."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from server.api.answer_builder import event_frames
from server.api.responses.events import ErrorEvent
from server.http.call import COMMENT
from server.limits import MAX_STORED_BATCHES, MAX_STORED_EVENTS
from server.store.records import UNFINISHED, Part, StoreFull
from server.store.service import ResponseStore, StoreUnavailable
from server.store.sql import SqlBackend

logger = logging.getLogger(__name__)

_WRITE_INTERVAL = 0.1
"""Minimum seconds between writes; events in between are batched."""
_POLL_INTERVAL = 0.1
"""Seconds between polls for new events."""
_LAST_POLLS = 20
"""Polls for the last event of an ended response; its process may have died before writing it."""

_LARGE = 2**16
"""Events of at least this many bytes count against the limit until their client has read them."""
_COPIES = 3
"""Copies of events in memory during sending: here, as a chunk, and in the transport."""
_MEMORY_RETRY_INTERVAL = 1.0
"""Seconds between retries while a client's events exceed the memory limit."""
_MAX_FAILURES = 100
"""Maximum consecutive failures of the store."""

_END = b"\n\n"
_LAST_EVENTS = tuple(
    b"event: " + name
    for name in (b"response.completed", b"response.incomplete", b"response.failed", b"error")
)


class Journal:
    """Stores the events of one response, numbered from 0."""

    def __init__(self, store: ResponseStore, owner: str, id_: str) -> None:
        self._store = store
        self._owner = owner
        self._id = id_
        self._unwritten: list[bytes] = []
        self._first = 0
        """Number of the first unwritten event."""
        self._size = 0
        self._written_at = 0.0
        self.ended = False
        """Whether the newest event is a terminal one."""

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._first + len(self._unwritten)

    async def add(self, frames: bytes) -> None:
        """Store events, immediately or batched with ones that follow soon.

        Beyond the size limit only the terminal event is stored.
        """
        self._unwritten += [each + _END for each in frames.split(_END)[:-1]]
        self.ended = bool(self._unwritten) and self._unwritten[-1].startswith(_LAST_EVENTS)
        if self.ended or time.monotonic() - self._written_at > _WRITE_INTERVAL:
            await self._write()

    async def _write(self) -> None:
        events, number = self._unwritten, self.next_number
        if self._size > MAX_STORED_EVENTS:
            events = [each for each in events[-1:] if each.startswith(_LAST_EVENTS)]
        batch = Part(position=number - len(events), body=b"".join(events))
        self._first, self._unwritten = number, []
        self._size += len(batch.body)
        self._written_at = time.monotonic()
        if not events:
            return
        try:
            await self._store.call(SqlBackend.add, self._owner, self._id, [batch])
        except (StoreFull, StoreUnavailable) as error:
            logger.warning("events of response %s are not stored: %s", self._id, error)


class _Poll(msgspec.Struct):
    """Result of one poll for events of a response."""

    after: int
    """Number of the newest event that was read."""
    frames: bytes = b""
    """The new events."""
    is_behind: bool = False
    """Whether more events are already stored."""
    done: bool = False
    polls_left: int = _LAST_POLLS


async def follow_events(
    store: ResponseStore, owner: str, id_: str, keep_alive: float, after: int = -1
) -> AsyncIterator[bytes]:
    """Yield the frames of a response's events from number `after` + 1 on, as they are stored.

    The first item is empty: taking it registers the client as a follower. After `keep_alive`
    seconds of silence a comment is sent; 0 disables this. Failures of the store are retried; if
    they persist, the last event reports the error.
    """
    last, failures = _Poll(after), 0
    last_sent_at = time.monotonic()
    with store.followers.holding(owner, 1):
        yield b""
        while not last.done:
            poll = last
            try:
                poll = await _poll(store, owner, id_, last)
                failures = 0
            except StoreUnavailable:
                failures += 1
                if failures == _MAX_FAILURES:
                    unavailable = ErrorEvent(
                        sequence_number=last.after + 1,
                        code="server_error",
                        message="The events cannot be read now; ask for the rest later "
                        "(starting_after).",
                        param=None,
                    )
                    yield event_frames([unavailable])
                    return
            frames, poll.frames = poll.frames, b""
            if not frames and keep_alive and time.monotonic() - last_sent_at >= keep_alive:
                frames = COMMENT
            size = len(frames) * _COPIES if len(frames) > _LARGE else 0
            if size and store.unread.exceeded(owner, size):
                frames = b""  # must not stay in memory during the sleep
                await asyncio.sleep(_MEMORY_RETRY_INTERVAL)
                continue  # read the same events again
            last = poll
            if frames:
                last_sent_at = time.monotonic()
                with store.unread.holding(owner, size):
                    yield frames
                frames = b""
            if not last.done and not last.is_behind:
                await asyncio.sleep(_POLL_INTERVAL)


async def _poll(store: ResponseStore, owner: str, id_: str, last: _Poll) -> _Poll:
    """Return the new events; idempotent, so a failure of the store loses none."""
    progress = await store.call(SqlBackend.progress, owner, id_, last.after)
    if progress is None:
        return _Poll(last.after, done=True)
    poll = _Poll(last.after, polls_left=last.polls_left)
    poll.is_behind = len(progress.events) == MAX_STORED_BATCHES
    frames: list[bytes] = []
    for batch in progress.events:
        first, in_batch = batch.position or 0, batch.body.split(_END)[:-1]
        poll.done |= in_batch[-1].startswith(_LAST_EVENTS)
        frames += in_batch[max(0, poll.after + 1 - first) :]
        poll.after = max(poll.after, first + len(in_batch) - 1)
    if frames or poll.done:
        poll.frames = _END.join([*frames, b""])
        return poll
    status = progress.status
    if status == "failed":
        poll.polls_left = 0  # the terminal event is written before this status
    elif status not in UNFINISHED:
        poll.polls_left -= 1
    abandoned = store.is_abandoned(id_, status, progress.beat)
    if status == "cancelled":
        poll.done = True
    elif poll.polls_left <= 0 or abandoned:
        record = await store.call(SqlBackend.get, owner, id_)
        poll.done = True
        if record is not None:
            body = as_failed(record.body) if abandoned else record.body
            shown = msgspec.json.decode(body)
            name = f"response.{shown['status']}"
            event = {"type": name, "sequence_number": poll.after + 1, "response": shown}
            poll.frames = b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(event))
    return poll


def as_failed(body: bytes) -> bytes:
    """Return an unfinished response as failed because its process ended."""
    error = {"code": "server_error", "message": "The process that made the response ended."}
    return msgspec.json.encode(msgspec.json.decode(body) | {"status": "failed", "error": error})
