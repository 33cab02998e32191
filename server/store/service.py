"""Kept responses and conversations, without holding up the event loop."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.store.jobs import Jobs
from server.store.records import (
    UNFINISHED,
    Backend,
    BackendFailed,
    EventBatch,
    StoredConversation,
    StoredItem,
    StoredResponse,
)

logger = logging.getLogger(__name__)

LEASE = 15.0
"""Seconds after which an unfinished response whose maker was not heard of has failed."""
_MAX_WAITING = 1024
"""Calls that wait for the store's thread; more are refused."""
_MAX_WAITING_OF_ONE = _MAX_WAITING // 2
"""How many of them may be about what one tenant keeps."""

Result = TypeVar("Result")


class StoreUnavailable(Exception):
    """The store does not work now, or has too much to do; the message is for the log."""


class ResponseStore:
    """Calls a backend from a thread of its own, one call at a time.

    Every method raises `StoreUnavailable`, besides what the backend's method raises.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._thread = ThreadPoolExecutor(1, "response store")
        self._waiting: Counter[str] = Counter()
        """Calls that wait, or are being made, by tenant."""
        self.jobs = Jobs(self.renew, StoreUnavailable)
        """What is made in the background of this process."""

    def close(self) -> None:
        """End once what was begun is done."""
        self._thread.shutdown()
        self._backend.close()

    async def put(
        self, record: StoredResponse, items: Sequence[StoredItem] = (), *, only_known: bool = False
    ) -> None:
        """Keep a response, with `only_known` if it still is, and add items to its conversation."""
        await self._call(self._backend.put, record, items, time.time(), only_known)

    async def get(self, tenant: str, id_: str) -> StoredResponse | None:
        """Return a response; one whose maker is gone as the unfinished one that it stays."""
        return await self._call(self._backend.get, tenant, id_)

    async def chain(self, tenant: str, id_: str) -> list[StoredResponse] | None:
        """Return a response after all that it goes on with; None if one of them is gone."""
        return await self._call(self._backend.chain, tenant, id_, time.time())

    async def delete(self, tenant: str, id_: str) -> bool:
        """Forget a response; return whether there was one."""
        return await self._call(self._backend.delete, tenant, id_)

    async def cancel(self, tenant: str, id_: str) -> None:
        """Ask whoever makes a response to give it up."""
        await self._call(self._backend.cancel, tenant, id_)

    async def renew(self, tenant: str, ids: Sequence[str]) -> set[str]:
        """Note that responses are still being made; return which are to be given up."""
        return await self._call(self._backend.renew, tenant, ids, time.time() + LEASE)

    async def add_events(self, tenant: str, id_: str, batch: EventBatch) -> None:
        """Keep events with a response."""
        await self._call(self._backend.add_events, tenant, id_, batch, time.time())

    async def events(self, tenant: str, id_: str, after: int) -> list[EventBatch]:
        """Return a response's events in order, from the batch on that has number `after` + 1."""
        return await self._call(self._backend.events, tenant, id_, after)

    async def put_conversation(self, conversation: StoredConversation) -> None:
        """Keep a conversation, or what is new of its metadata."""
        await self._call(self._backend.put_conversation, conversation, time.time())

    async def conversation(self, tenant: str, id_: str) -> StoredConversation | None:
        """Return a conversation."""
        return await self._call(self._backend.conversation, tenant, id_)

    async def delete_conversation(self, tenant: str, id_: str) -> bool:
        """Forget a conversation; return whether there was one."""
        return await self._call(self._backend.delete_conversation, tenant, id_)

    async def add_items(self, tenant: str, id_: str, items: Sequence[StoredItem]) -> bool:
        """Add items to a conversation; return whether there is one."""
        return await self._call(self._backend.add_items, tenant, id_, items, time.time())

    async def items(self, tenant: str, id_: str) -> list[StoredItem] | None:
        """Return the items of a conversation; None if there is none."""
        return await self._call(self._backend.items, tenant, id_, time.time())

    async def delete_item(self, tenant: str, id_: str, item: str) -> bool:
        """Forget an item; return whether there was one."""
        return await self._call(self._backend.delete_item, tenant, id_, item)

    async def _call(
        self,
        method: Callable[..., Result],
        whose: str | StoredResponse | StoredConversation,
        *arguments: object,
    ) -> Result:
        tenant = whose if isinstance(whose, str) else whose.tenant
        waiting = self._waiting
        if waiting[tenant] >= _MAX_WAITING_OF_ONE or waiting.total() >= _MAX_WAITING:
            raise StoreUnavailable("too many calls are waiting")
        waiting[tenant] += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, method, whose, *arguments)
        except BackendFailed as error:
            logger.warning("the store of responses failed: %s", error)
            raise StoreUnavailable(str(error)) from error
        finally:
            waiting[tenant] -= 1
            if not waiting[tenant]:
                del waiting[tenant]


def is_abandoned(record: StoredResponse) -> bool:
    """Whether whoever made an unfinished response is gone."""
    lease = record.lease
    return record.status in UNFINISHED and lease is not None and lease < time.time()
