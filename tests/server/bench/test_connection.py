"""The client against misbehaving servers, scripted over real sockets."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from server.bench.client import complete
from server.bench.connection import HttpClient
from server.bench.summary import Record
from tests.support.streams import stream_completion
from tests.support.waiting import PATIENCE, until_async

pytestmark = pytest.mark.slow  # it opens sockets

GUARD_SECONDS = 60

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def sends(*parts: bytes) -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return reply


class Server:
    """Answers the n-th request with the n-th reply, closing after those in `closes`."""

    def __init__(self, replies: list[Reply], closes: set[int]) -> None:
        self._replies = replies
        self._closes = closes
        self.requests: list[bytes] = []
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                self.requests.append(head + await reader.readexactly(length))
                index = len(self.requests) - 1
                await self._replies[index](writer)
                if index in self._closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def play(
    replies: list[Reply],
    use: Callable[[str], Coroutine[Any, Any, Any]],
    closes: set[int] | None = None,
) -> tuple[Server, Any]:
    """Run `use` with the address of a server that plays `replies`."""

    async def run() -> tuple[Server, Any]:
        server = Server(replies, closes or set())
        async with asyncio.timeout(GUARD_SECONDS):
            listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
            async with listening:
                port = listening.sockets[0].getsockname()[1]
                return server, await use(f"http://127.0.0.1:{port}")

    return asyncio.run(run())


async def ask(url: str, times: int = 1, give_up_after: float = 5.0) -> list[Record]:
    client = HttpClient(url, {"X-Test": "yes"})
    try:
        return [
            await complete(
                client, "/v1/completions", b"{}", stream=True, give_up_after=give_up_after
            )
            for _ in range(times)
        ]
    finally:
        client.close()


def test_a_stream_is_counted_and_timed() -> None:
    body = TOKEN + TOKEN + USAGE + DONE
    pieces = [chunk(body[:7]), chunk(body[7:90]), chunk(body[90:]), b"0\r\n\r\n"]
    server, [result] = play([sends(CHUNKED, *pieces)], ask)
    assert (result.error, result.status, result.deltas) == (None, 200, 2)
    assert (result.output_tokens, result.prompt_tokens) == (3, 2)
    assert 0 < (result.first_token or 0) <= result.total
    assert len(result.inter_token_latencies()) == 1
    assert b"\r\nX-Test: yes\r\n" in server.requests[0]


def test_connections_are_kept_and_replaced_when_the_server_closed_them() -> None:
    whole = sends(CHUNKED, chunk(TOKEN + DONE), b"0\r\n\r\n")
    server, results = play([whole] * 3, lambda url: ask(url, times=3), closes={1})
    assert [result.error for result in results] == [None] * 3
    assert len(server.requests) == 3
    assert server.connections == 2


def test_a_connection_that_was_closed_while_it_was_idle_is_replaced() -> None:
    whole = sends(CHUNKED, chunk(TOKEN + DONE), b"0\r\n\r\n")

    async def twice(url: str) -> list[Record]:
        client = HttpClient(url)
        try:
            asked = client, "/v1/completions", b"{}"
            first = await complete(*asked, stream=True, give_up_after=PATIENCE)
            closing = client._idle[0]._transport.is_closing
            await until_async(closing, "the client has seen that it was closed")
            return [first, await complete(*asked, stream=True, give_up_after=PATIENCE)]
        finally:
            client.close()

    server, results = play([whole] * 2, twice, closes={0})
    assert [result.error for result in results] == [None] * 2
    assert server.connections == 2


def test_answer_can_end_with_its_connection() -> None:
    _, [result] = play([sends(HEAD + b"\r\n", TOKEN, DONE)], ask, closes={0})
    assert (result.error, result.deltas) == (None, 1)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (sends(b""), "connection_lost"),
        (sends(b"HTTP/1.1 200 OK\r\nX-"), "connection_lost"),
        (sends(CHUNKED, chunk(TOKEN)), "connection_lost"),
        (sends(CHUNKED, chunk(TOKEN), b"0\r\n\r\n"), "stream_cut"),
        (sends(b"hello?\r\n\r\n"), "malformed_answer"),
        (sends(CHUNKED, chunk(b"data: {]\n\n" + DONE), b"0\r\n\r\n"), "malformed_answer"),
        (sends(CHUNKED, chunk(b'data: {"error":{"x":1}}\n\n'), b"0\r\n\r\n"), "error_event"),
        (sends(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"), "http_503"),
        (sends(b"HTTP/1.1 302 Go\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"), "http_302"),
    ],
)
def test_failures_have_a_kind(reply: Reply, error: str) -> None:
    server, [result] = play([reply], ask, closes={0})
    assert result.error == error
    assert result.total > 0
    assert len(server.requests) == 1
    if error == "http_503":
        assert result.detail == "busy"


def test_silent_server_times_out() -> None:
    silent: Reply = sends(CHUNKED, chunk(TOKEN))
    _, [result] = play([silent], lambda url: ask(url, give_up_after=1.0))
    assert (result.error, result.deltas) == ("timeout", 1)


def test_refused_connection_is_a_failure() -> None:
    async def refused(url: str) -> Record:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))  # and does not listen
            return (await ask(f"http://127.0.0.1:{held.getsockname()[1]}"))[0]

    _, result = play([], refused)
    assert result.error == "connection_refused"


def test_tokens_without_text_still_have_a_first_time() -> None:
    ends = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
    _, [result] = play([sends(CHUNKED, chunk(ends + USAGE + DONE), b"0\r\n\r\n")], ask)
    assert result.first_token
    assert (result.deltas, result.finish_reason) == (0, "length")


def test_broken_stream_raises_if_full_answer_is_required() -> None:
    async def whole(url: str) -> None:
        with pytest.raises(ConnectionError, match="connection_lost"):
            await stream_completion(f"{url}/v1/completions", {"prompt": "x"})

    server, _ = play([sends(CHUNKED, chunk(TOKEN))], whole, closes={0})
    sent = json.loads(server.requests[0].partition(b"\r\n\r\n")[2])
    assert sent == {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8000", "http://"])
def test_only_http_addresses_are_targets(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        HttpClient(url)


def test_headers_cannot_be_injected() -> None:
    with pytest.raises(ValueError, match="line break"):
        HttpClient("http://127.0.0.1", {"X": "a\r\nY: b"})
