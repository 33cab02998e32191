import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import msgspec
import pytest

from engine.shared.messages import RequestOutput
from server.http.disconnect import DISCONNECT, DisconnectNotifier
from server.limits import MAX_PROMPTS
from tests.support.waiting import until_async

GUARD_SECONDS = 60


class Connection:
    """One HTTP request to an app, with a client controlled by the test."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        self.sent: list[dict[str, Any]] = []
        self.something_sent = asyncio.Event()
        self.hang_up = asyncio.Event()
        self.disconnect = DisconnectNotifier()
        self._incoming = [
            {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}
        ]

    async def receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop()
        await self.hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.something_sent.set()


def scripted(
    app: Any,
    body: dict[str, Any],
    play: Callable[[Connection], Coroutine[Any, Any, None]],
    *,
    is_own_server: bool = False,
) -> Connection:
    """Serve one request with `play` as the client; both must end within the timeout."""

    async def run() -> Connection:
        connection = Connection("/v1/completions", {"prompt": "x", **body})
        if is_own_server:
            connection.scope[DISCONNECT] = connection.disconnect
        async with asyncio.timeout(GUARD_SECONDS), asyncio.TaskGroup() as group:
            group.create_task(app(connection.scope, connection.receive, connection.send))
            group.create_task(play(connection))
        return connection

    return asyncio.run(run())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_own_server", [True, False])
def test_disconnected_client_frees_its_engines(
    app: Any, engines: Any, front_end_metrics: Any, is_own_server: bool, stream: bool, n: int
) -> None:
    engines.script = lambda stream: [RequestOutput(1, [70])]

    async def play(connection: Connection) -> None:
        await engines.submitted.wait()
        await until_async(lambda: engines.streams[-1].is_awaited, "its tokens are waited for")
        if stream:
            await connection.something_sent.wait()
        if is_own_server:
            connection.disconnect.notify()
        else:
            connection.hang_up.set()
        for running in engines.streams:
            await running.closed.wait()

    connection = scripted(app, {"stream": stream, "n": n}, play, is_own_server=is_own_server)
    assert len(engines.streams) == n
    assert all(message.get("more_body", True) for message in connection.sent)
    assert bool(connection.sent) is stream
    text = front_end_metrics.render(engines).decode()
    assert f'finished_reason="abort",model_name="tiny"}} {n}.0' in text


def test_client_disconnecting_during_body_is_forgotten(app: Any, engines: Any) -> None:
    async def run() -> Connection:
        connection = Connection("/v1/completions", {})
        connection.hang_up.set()
        await connection.receive()
        await app(connection.scope, connection.receive, connection.send)
        return connection

    assert asyncio.run(run()).sent == []
    assert engines.streams == []


def test_request_whose_connection_has_ended_is_not_computed(app: Any, engines: Any) -> None:
    async def run() -> Connection:
        connection = Connection("/v1/completions", {"prompt": "x"})
        connection.scope[DISCONNECT] = connection.disconnect
        connection.disconnect.notify()
        await app(connection.scope, connection.receive, connection.send)
        return connection

    assert asyncio.run(run()).sent == []
    assert engines.streams == []


def test_all_available_events_are_sent_at_once(app: Any, engines: Any) -> None:
    engines.script = lambda stream: []
    ids = engines.tokenizer.encode("hello world", add_special_tokens=False)

    async def play(connection: Connection) -> None:
        await engines.submitted.wait()
        (running,) = engines.streams
        running.feed(RequestOutput(1, ids[:1]))
        await connection.something_sent.wait()
        connection.something_sent.clear()
        running.feed(RequestOutput(1, ids[1:]))
        await connection.something_sent.wait()
        connection.something_sent.clear()
        running.feed(RequestOutput(1, [], "length"))
        await connection.something_sent.wait()

    sent = scripted(app, {"stream": True, "max_tokens": 50}, play).sent
    assert [message["type"] for message in sent] == ["http.response.start"] + [
        "http.response.body"
    ] * 3
    bodies = [message["body"].count(b"data: ") for message in sent[1:]]
    assert bodies == [1, 1, 2]
    assert [message["more_body"] for message in sent[1:]] == [True, True, False]


def test_outer_cancellation_is_not_mistaken_for_disconnect(app: Any, engines: Any) -> None:
    engines.script = lambda stream: []

    async def run() -> None:
        connection = Connection("/v1/completions", {"prompt": "x"})
        serving = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
        await engines.submitted.wait()
        await until_async(lambda: engines.streams[0].is_awaited, "its tokens are waited for")
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(asyncio.wait_for(run(), GUARD_SECONDS))
    assert engines.streams[0].closed.is_set()


async def test_other_requests_run_while_thousands_of_sequences_are_submitted(
    app: Any, engines: Any, tokenizer: Any
) -> None:
    turns: set[int] = set()

    async def others() -> None:
        while len(engines.streams) < MAX_PROMPTS:
            turns.add(len(engines.streams))
            await asyncio.sleep(0)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://swell") as client:
        body = {"prompt": ["a"] * MAX_PROMPTS, "max_tokens": 1}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await others()
        assert (await asked).status_code == 200
    assert len(turns) > MAX_PROMPTS // 64
