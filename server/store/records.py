"""What is kept: responses, and conversations that they are turns of. Each belongs to a tenant."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

ROW_BYTES = 256
"""What counts against the store's limit for a row besides its texts."""

UNFINISHED: frozenset[Status] = frozenset(("queued", "in_progress"))


class StoredResponse(msgspec.Struct, kw_only=True):
    """One response, with the items that it was made of."""

    id: str
    tenant: str
    created: float
    """Seconds since the epoch."""
    status: Status
    previous: str | None = None
    """The response whose conversation this one goes on with."""
    conversation: str | None = None
    input: bytes
    """JSON array of the items that the request added."""
    response: bytes
    """JSON of the response as clients see it; its output is what the next turn begins with."""
    lease: float | None = None
    """When whoever makes an unfinished response has to have been heard of again."""

    @property
    def size(self) -> int:
        """Bytes that count against the store's limit."""
        return len(self.input) + len(self.response) + ROW_BYTES


class StoredConversation(msgspec.Struct, kw_only=True):
    """A list of items that requests name, go on with and add to."""

    id: str
    tenant: str
    created: float
    metadata: bytes
    """JSON object."""

    @property
    def size(self) -> int:
        """Bytes that count against the store's limit, without the items."""
        return len(self.metadata) + ROW_BYTES


class StoredItem(msgspec.Struct, kw_only=True):
    """One item of a conversation."""

    id: str
    item: bytes
    """JSON object."""

    @property
    def size(self) -> int:
        """Bytes that count against the store's limit."""
        return len(self.item) + ROW_BYTES


class EventBatch(msgspec.Struct, kw_only=True):
    """Some events of a response that is made in the background, in a row."""

    first: int
    """Number of the first of them, from 0."""
    frames: bytes
    """As clients get them."""


class TooLong(Exception):
    """A conversation is longer than what one request may have."""


class StoreFull(Exception):
    """What is to be kept is larger than all that may be kept."""


class BackendFailed(Exception):
    """What records are in does not work now; the message is for the log."""


class Backend(Protocol):
    """Where records are. Calls block; every change is whole and kept once its call returns."""

    def put(
        self,
        record: StoredResponse,
        items: Sequence[StoredItem],
        now: float,
        only_known: bool = False,
    ) -> None:
        """Keep a response, in place of the unfinished one of its name, not of a finished one.

        With `only_known` nothing is kept unless there is one already: what was forgotten while
        it was made does not come back.

        With it, or not at all, its conversation gets the items. What has no room any more is
        forgotten.

        Raises:
            StoreFull: there is no room even then.
            TooLong: the conversation would have too many items, or be too large.
        """
        ...

    def get(self, tenant: str, id_: str) -> StoredResponse | None:
        """Return a response."""
        ...

    def chain(self, tenant: str, id_: str, now: float) -> list[StoredResponse] | None:
        """Return a response after all that it goes on with, the oldest first; None: one is gone.

        All of them count as used now.

        Raises:
            TooLong: there are too many of them, or they are too large.
        """
        ...

    def delete(self, tenant: str, id_: str) -> bool:
        """Forget a response; return whether there was one."""
        ...

    def cancel(self, tenant: str, id_: str) -> None:
        """Ask whoever makes a response to give it up."""
        ...

    def renew(self, tenant: str, ids: Sequence[str], lease: float) -> set[str]:
        """Note that responses are being made; return which are to be given up, or are gone."""
        ...

    def add_events(self, tenant: str, id_: str, batch: EventBatch, now: float) -> None:
        """Keep events with a response, if there is one; they are forgotten with it.

        Raises:
            StoreFull: there is no room.
        """
        ...

    def events(self, tenant: str, id_: str, after: int) -> list[EventBatch]:
        """Return a response's events in order, from the batch on that has number `after` + 1."""
        ...

    def put_conversation(self, conversation: StoredConversation, now: float) -> None:
        """Keep a conversation, or what is new of its metadata."""
        ...

    def conversation(self, tenant: str, id_: str) -> StoredConversation | None:
        """Return a conversation."""
        ...

    def delete_conversation(self, tenant: str, id_: str) -> bool:
        """Forget a conversation with its items; return whether there was one."""
        ...

    def add_items(self, tenant: str, id_: str, items: Sequence[StoredItem], now: float) -> bool:
        """Add items at the end of a conversation; return whether there is one.

        Raises:
            StoreFull: there is no room.
            TooLong: it would have too many items, or be too large.
        """
        ...

    def items(self, tenant: str, id_: str, now: float) -> list[StoredItem] | None:
        """Return all items of a conversation, the oldest first; None if there is none."""
        ...

    def delete_item(self, tenant: str, id_: str, item: str) -> bool:
        """Forget an item; return whether there was one."""
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...
