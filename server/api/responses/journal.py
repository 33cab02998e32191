"""The events of a background response: stored as they come, sent to clients that follow it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from server.api.growing import event_frames
from server.api.responses.events import ErrorEvent
from server.http.call import COMMENT
from server.limits import MAX_KEPT_BATCHES, MAX_KEPT_EVENTS
from server.store.records import UNFINISHED, Part, StoreFull
from server.store.service import ResponseStore, StoreUnavailable
from server.store.sql import SqlBackend

logger = logging.getLogger(__name__)

_BETWEEN_WRITES = 0.1
"""Seconds within which events are written together."""
_LOOK = 0.1
"""Seconds between looks at whether there are more."""
_LAST_LOOKS = 20
"""Times to look for the last event of an ended response; its process may have died before it."""

_LARGE = 2**16
"""Minimum bytes of events that count against the limit until their client has read them."""
_COPIES = 3
"""Copies of events in memory while they are sent: here, as a chunk, and in the transport."""
_UNTIL_THERE_IS_ROOM = 1.0
"""Seconds between tries for a client whose events find no room."""
_MAX_FAILURES = 100
"""Consecutive failures of the store that are tolerated."""

_END = b"\n\n"
_LAST_EVENTS = tuple(
    b"event: " + name
    for name in (b"response.completed", b"response.incomplete", b"response.failed", b"error")
)


class Journal:
    """Stores the events of one response, with their numbers from 0 on."""

    def __init__(self, store: ResponseStore, owner: str, id_: str) -> None:
        self._store = store
        self._owner = owner
        self._id = id_
        self._unwritten: list[bytes] = []
        self._first = 0
        """Number of the first event that is not written."""
        self._size = 0
        self._written_at = 0.0
        self.ended = False
        """Whether the newest event is one that ends a stream."""

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._first + len(self._unwritten)

    async def add(self, frames: bytes) -> None:
        """Add events; they are stored at once, or together with those that follow soon.

        If there are too many, only the last of the later ones is stored.
        """
        self._unwritten += [each + _END for each in frames.split(_END)[:-1]]
        self.ended = bool(self._unwritten) and self._unwritten[-1].startswith(_LAST_EVENTS)
        if self.ended or time.monotonic() - self._written_at > _BETWEEN_WRITES:
            await self._write()

    async def _write(self) -> None:
        events, number = self._unwritten, self.next_number
        if self._size > MAX_KEPT_EVENTS:
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


class _Look(msgspec.Struct):
    """What a look at the events of a response has found."""

    after: int
    """Number of the newest event that was read."""
    frames: bytes = b""
    """Those that are new."""
    is_behind: bool = False
    """Whether there are more events now."""
    done: bool = False
    looks_left: int = _LAST_LOOKS


async def told(
    store: ResponseStore, owner: str, id_: str, keep_alive: float, after: int = -1
) -> AsyncIterator[bytes]:
    """Yield the frames of a response's events from number `after` + 1 on, as they come.

    The first item is empty: once it is taken the client counts as a follower. After `keep_alive`
    seconds of silence a comment is sent; 0: never. A store that fails is asked again; if it keeps
    failing, the last event says so.
    """
    seen, failures = _Look(after), 0
    told_at = time.monotonic()
    with store.followers.holding(owner, 1):
        yield b""
        while not seen.done:
            found = seen
            try:
                found = await _look(store, owner, id_, seen)
                failures = 0
            except StoreUnavailable:
                failures += 1
                if failures == _MAX_FAILURES:
                    unavailable = ErrorEvent(
                        sequence_number=seen.after + 1,
                        code="server_error",
                        message="The events cannot be read now; ask for the rest later "
                        "(starting_after).",
                        param=None,
                    )
                    yield event_frames([unavailable])
                    return
            frames, found.frames = found.frames, b""
            if not frames and keep_alive and time.monotonic() - told_at >= keep_alive:
                frames = COMMENT
            held = len(frames) * _COPIES if len(frames) > _LARGE else 0
            if held and store.unread.exceeded(owner, held):
                frames = b""  # is not to be in memory meanwhile
                await asyncio.sleep(_UNTIL_THERE_IS_ROOM)
                continue  # and looks again from where it was
            seen = found
            if frames:
                told_at = time.monotonic()
                with store.unread.holding(owner, held):
                    yield frames
                frames = b""
            if not seen.done and not seen.is_behind:
                await asyncio.sleep(_LOOK)


async def _look(store: ResponseStore, owner: str, id_: str, seen: _Look) -> _Look:
    """Return the events that are new; nothing is lost if the store does not work now."""
    progress = await store.call(SqlBackend.progress, owner, id_, seen.after)
    if progress is None:
        return _Look(seen.after, done=True)
    found = _Look(seen.after, looks_left=seen.looks_left)
    found.is_behind = len(progress.events) == MAX_KEPT_BATCHES
    frames: list[bytes] = []
    for batch in progress.events:
        first, every = batch.position or 0, batch.body.split(_END)[:-1]
        found.done |= every[-1].startswith(_LAST_EVENTS)
        frames += every[max(0, found.after + 1 - first) :]
        found.after = max(found.after, first + len(every) - 1)
    if frames or found.done:
        found.frames = _END.join([*frames, b""])
        return found
    status = progress.status
    if status == "failed":
        found.looks_left = 0  # its last event is written before its status
    elif status not in UNFINISHED:
        found.looks_left -= 1
    abandoned = store.is_abandoned(id_, status, progress.beat)
    if status == "cancelled":
        found.done = True
    elif found.looks_left <= 0 or abandoned:
        record = await store.call(SqlBackend.get, owner, id_)
        found.done = True
        if record is not None:
            body = as_failed(record.body) if abandoned else record.body
            shown = msgspec.json.decode(body)
            name = f"response.{shown['status']}"
            event = {"type": name, "sequence_number": found.after + 1, "response": shown}
            found.frames = b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(event))
    return found


def as_failed(body: bytes) -> bytes:
    """Return an unfinished response as failed, because the process that generated it ended."""
    error = {"code": "server_error", "message": "The process that made the response ended."}
    return msgspec.json.encode(msgspec.json.decode(body) | {"status": "failed", "error": error})
