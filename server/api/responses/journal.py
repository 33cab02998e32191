"""The events of a response that is made in the background: kept as they come, told to who asks."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from server.access.limits import MAX_KEPT_EVENTS
from server.api.responses.store_errors import kept
from server.store.records import UNFINISHED, EventBatch, StoredResponse, StoreFull
from server.store.service import ResponseStore, StoreUnavailable, is_abandoned

logger = logging.getLogger(__name__)

_BETWEEN_WRITES = 0.1
"""Seconds within which events are written together."""
_LOOK = 0.1
"""Seconds between looks at whether there are more."""
_LAST_LOOKS = 20
"""Looks for the last event of a response that has ended: its maker may have died before it."""

_END = b"\n\n"
_LAST_EVENTS = tuple(
    b"event: " + name
    for name in (b"response.completed", b"response.incomplete", b"response.failed", b"error")
)


class Journal:
    """Writes down the events of one response, numbered from 0 as they are themselves."""

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
        """Add events; they are kept at once, or together with those that follow soon.

        Where there are too many, of the later ones only the last is kept.
        """
        self._unwritten += [each + _END for each in frames.split(_END)[:-1]]
        self.ended = bool(self._unwritten) and self._unwritten[-1].startswith(_LAST_EVENTS)
        if self.ended or time.monotonic() - self._written_at > _BETWEEN_WRITES:
            await self._write()

    async def _write(self) -> None:
        events, number = self._unwritten, self.next_number
        if self._size > MAX_KEPT_EVENTS:
            events = [each for each in events[-1:] if each.startswith(_LAST_EVENTS)]
        batch = EventBatch(first=number - len(events), frames=b"".join(events))
        self._first, self._unwritten = number, []
        self._size += len(batch.frames)
        self._written_at = time.monotonic()
        if not events:
            return
        try:
            await self._store.add_events(self._owner, self._id, batch)
        except (StoreFull, StoreUnavailable) as error:
            logger.warning("events of response %s are not kept: %s", self._id, error)


async def told(store: ResponseStore, owner: str, id_: str, after: int = -1) -> AsyncIterator[bytes]:
    """Yield the frames of a response's events behind number `after`, those to come as they come.

    Raises:
        ApiError: the store does not work.
    """
    looks_left = _LAST_LOOKS
    while True:
        # In this order: of one that has ended all events are there.
        record = await kept(store.get(owner, id_))
        for batch in await kept(store.events(owner, id_, after)):
            every = batch.frames.split(_END)[:-1]
            if frames := every[max(0, after + 1 - batch.first) :]:
                after = batch.first + len(every) - 1
                yield _END.join([*frames, b""])
            if every[-1].startswith(_LAST_EVENTS):
                return
        if record is None or record.status == "cancelled":
            return
        if record.status == "failed":
            looks_left = 0  # that is written down last
        elif record.status not in UNFINISHED:
            looks_left -= 1
        if not looks_left or is_abandoned(record):
            yield last_event(record, after + 1)
            return
        await asyncio.sleep(_LOOK)


def last_event(record: StoredResponse, number: int) -> bytes:
    """Return the frame of the event that tells how a response ended."""
    shown, status = msgspec.json.decode(record.response), record.status
    if status in UNFINISHED:
        status = "failed"
        why = "The process that made the response ended."
        shown |= {"status": status, "error": {"code": "server_error", "message": why}}
    name = f"response.{status}"
    event = {"type": name, "sequence_number": number, "response": shown}
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(event))
