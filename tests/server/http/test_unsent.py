"""Limits on buffered responses that clients do not read."""

import asyncio
from collections import Counter
from typing import Any

from server.access.tenants import SCOPE_KEY, named_tenant
from server.http.protocol import FREE_BYTES, UnsentBudget
from server.limits import MAX_UNSENT, MAX_UNSENT_OF_ONE

SIZE = 4 << 20
ALICE, BOB, CAROL = (named_tenant(name) for name in ("alice", "bob", "carol"))


class Clients:
    """Connections to an application that are read only on request."""

    def __init__(self) -> None:
        self.budget = UnsentBudget()
        self.read = asyncio.Event()
        self.answers: Counter[tuple[str, int]] = Counter()
        """Counts by tenant and status."""
        self.bytes = 0
        self.tasks: list[asyncio.Future[None]] = []

    async def ask(self, tenant: Any, count: int, size: int = SIZE, *, stream: bool = False) -> None:
        """Send requests and wait until each is answered or blocked."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope[SCOPE_KEY] = tenant
            length = [] if stream else [(b"content-length", str(size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": length})
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": stream})
            if stream:
                await send({"type": "http.response.body", "body": b""})

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.answers[tenant.name, message["status"]] += 1
            else:
                self.bytes += len(message["body"])

        async def receive() -> Any:
            raise AssertionError("it is not asked for")

        async def drain() -> None:
            await self.read.wait()

        counted = self.budget.counted(app, drain)
        for _ in range(count):
            scope = {"type": "http", "path": "/v1/responses/resp_1"}
            self.tasks.append(asyncio.ensure_future(counted(scope, receive, send)))
        for _ in range(5):
            await asyncio.sleep(0)


async def test_unsent_data_is_bounded_per_tenant_and_in_total() -> None:
    clients = Clients()
    fits = MAX_UNSENT_OF_ONE // SIZE
    await clients.ask(ALICE, 800)
    assert clients.answers == {("alice", 200): fits, ("alice", 429): 800 - fits}
    assert clients.bytes < MAX_UNSENT_OF_ONE + 800 * 1000, "of what is refused only why"
    await clients.ask(BOB, 800)
    assert clients.answers["bob", 200] == fits
    await clients.ask(CAROL, 1, 2 * SIZE)
    assert clients.answers["carol", 503] == 1, f"{MAX_UNSENT} bytes are all"
    await clients.ask(CAROL, 1, FREE_BYTES)
    assert clients.answers["carol", 200] == 1
    clients.read.set()
    await asyncio.gather(*clients.tasks)
    await clients.ask(CAROL, 1, MAX_UNSENT * 2)
    assert clients.answers["carol", 200] == 2, "what is alone may be larger"


async def test_a_stream_waits_for_its_client_and_counts_meanwhile() -> None:
    clients = Clients()
    await clients.ask(ALICE, MAX_UNSENT_OF_ONE // SIZE, stream=True)
    assert not any(task.done() for task in clients.tasks)
    await clients.ask(ALICE, 1)
    assert clients.answers["alice", 429] == 1
    clients.tasks[0].cancel()  # a lost connection
    await asyncio.gather(clients.tasks[0], return_exceptions=True)
    await clients.ask(ALICE, 1)
    assert clients.answers["alice", 429] == 1
    clients.read.set()
    await asyncio.gather(*clients.tasks[1:])
