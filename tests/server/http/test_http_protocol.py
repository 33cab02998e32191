"""Clients that send or read slowly or incorrectly, over real connections."""

import asyncio
import contextlib
import json
import select
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
import uvicorn

from engine.shared.messages import AddRequest, RequestOutput
from server.access.guards import tls_options
from server.config import FrontEndConfig, GuardConfig
from server.http.listener import HttpServer
from server.http.protocol import limited_protocol
from server.http.request_meter import MAX_PIPELINED
from server.limits import MAX_UNREAD
from server.router.token_stream import RequestStream, UnreadOutputs
from tests.support.certificates import make_certificate
from tests.support.waiting import PATIENCE, until_async

BODY = b'{"prompt": "x", "stream": true}'


def head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


HEAD = head(len(BODY))


@contextlib.asynccontextmanager
async def served(app: Any, guards: GuardConfig) -> AsyncIterator[int]:
    """Serve an app on a free port of this process, as a front end does."""
    async with served_by(app, guards) as (_, port):
        yield port


@contextlib.asynccontextmanager
async def served_by(app: Any, guards: GuardConfig) -> AsyncIterator[tuple[HttpServer, int]]:
    """Serve an app like `serve`; also yield the server."""
    server = HttpServer(
        uvicorn.Config(
            app,
            http=limited_protocol(guards),
            log_level="critical",
            lifespan="off",
            ws="none",
            timeout_keep_alive=guards.keep_alive_timeout,
            **tls_options(guards),
        ),
        guards.receive_timeout,
    )
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        # Accepted connections inherit small buffers, so that a stalled client is noticed.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        listening.listen()
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield server, listening.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comple", HEAD[:-2]])
async def test_incomplete_head_times_out(app: Any, sent: bytes) -> None:
    async with served(app, GuardConfig(receive_timeout=0.5)) as port:
        reader, writer = await connect(port)
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""
        writer.close()


async def test_incomplete_second_head_times_out(app: Any) -> None:
    async with served(app, GuardConfig(receive_timeout=0.5)) as port:
        reader, writer = await connect(port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 408 " in answer
        writer.close()


async def test_head_size_is_limited(app: Any) -> None:
    async with served(app, GuardConfig(max_header_bytes=4096)) as port:
        reader, writer = await connect(port)
        writer.write(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and not reader._buffer:  # type: ignore[attr-defined]
                writer.write(b"X-Filler: %s\r\n" % (b"x" * 1000))
                await writer.drain()
                await asyncio.sleep(0.001)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()


class TestServerWithShortTimeouts:
    @pytest.fixture
    def config(self, config: FrontEndConfig) -> FrontEndConfig:
        return msgspec.structs.replace(config, guards=GuardConfig(receive_timeout=0.5))

    async def test_incomplete_body_times_out(self, app: Any) -> None:
        async with served(app, GuardConfig()) as port:
            reader, writer = await connect(port)
            writer.write(HEAD + BODY[:-5])
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"request_timeout" in answer
            writer.close()


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


async def flood(port: int, start: bytes, piece: bytes, most: int = 2**24) -> tuple[bytes, int]:
    """Send a start, then a piece repeatedly; return the response and the bytes sent."""
    reader, writer = await connect(port)
    sent = 0
    with contextlib.suppress(ConnectionError):
        writer.write(start)
        while sent < most and not reader.at_eof():
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
            await asyncio.sleep(0)
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
    writer.close()
    return answer, sent


@pytest.mark.parametrize(
    "piece",
    [b"X-Filler: %s\r\n" % (b"x" * 1000), b"x" * 4096, b"a: b\r\n" * 1000],
    ids=["lines", "one line", "short lines"],
)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/health"])
async def test_endless_trailers_are_cut_off(app: Any, piece: bytes, path: bytes) -> None:
    async with served(app, GuardConfig(max_body_bytes=2**17)) as port:
        start = CHUNKED.replace(b"/v1/completions", path)
        start += b"%x\r\n%s\r\n0\r\nX: " % (len(BODY), BODY)
        _, sent = await flood(port, start, piece)
        assert sent < 2**22


async def test_trailers_are_no_headers(app: Any) -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.extend(scope["headers"])
        await app(scope, receive, send)

    async with served(application, GuardConfig()) as port:
        reader, writer = await connect(port)
        writer.write(CHUNKED.replace(b"POST /v1/completions", b"GET /health") + b"1\r\n \r\n")
        writer.write(b"0\r\nAuthorization: Bearer late\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert b"authorization" not in dict(seen)


@pytest.mark.parametrize("piece", [b"0" * 4096, b"5;" + b"e" * 4096, b"e" * 4096])
async def test_endless_chunk_sizes_and_extensions_are_cut_off(app: Any, piece: bytes) -> None:
    async with served(app, GuardConfig(max_body_bytes=2**17)) as port:
        _, sent = await flood(port, CHUNKED, piece)
        assert sent < 2**22


async def test_size_of_head_in_one_piece_is_limited(app: Any) -> None:
    async with served(app, GuardConfig(max_header_bytes=4096)) as port:
        reader, writer = await connect(port)
        writer.write(b"GET /health HTTP/1.1\r\nX: %s\r\n\r\n" % (b"x" * 5000))
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()


UNFINISHED = head(10**6).replace(b"/v1/completions", b"/nowhere")
HURRIED = GuardConfig(receive_timeout=0.5, keep_alive_timeout=1)


@pytest.mark.parametrize(
    "sent",
    [
        [UNFINISHED],
        [UNFINISHED, b"x"],
        [UNFINISHED, b"x", b"x"],
        [CHUNKED.replace(b"/v1/completions", b"/nowhere"), b"5", b"\r"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n", b"G"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"x"],
    ],
    ids=["unfinished", "one byte", "two bytes", "chunked", "blank line", "next head", "upgrade"],
)  # fmt: skip
async def test_connection_closes_after_early_answer(app: Any, sent: list[bytes]) -> None:
    async with served(app, HURRIED) as port:
        reader, writer = await connect(port)
        for piece in sent:
            writer.write(piece)
            if piece is sent[0]:
                await reader.readuntil(b"}")
        with contextlib.suppress(ConnectionError):  # the server may close before the last piece
            await reader.read()
        writer.close()


async def test_a_client_that_keeps_sending_after_an_answer_is_disconnected(app: Any) -> None:
    async with served(app, GuardConfig(max_body_bytes=2**17)) as port:
        endless = head(10**9).replace(b"/v1/completions", b"/nowhere")
        _, sent = await flood(port, endless, b"x" * 4096, most=2**25)
        assert sent < 2**24


async def test_client_can_send_full_body_before_reading_early_answer(app: Any) -> None:
    async with served(app, GuardConfig(keep_alive_timeout=1)) as port:
        reader, writer = await connect(port)
        for _ in range(2):
            body = b"x" * 2**20
            writer.write(head(len(body)).replace(b"/v1/completions", b"/nowhere") + body)
            await writer.drain()
            answer = await reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 404 ")
        assert await reader.read() == b""
        writer.close()


async def test_client_sending_too_large_body_gets_the_refusal(
    app: Any,
) -> None:
    limit = FrontEndConfig().guards.max_body_bytes
    body = b"x" * (8 * limit)

    async with served(app, GuardConfig()) as port:
        for sent in (head(len(body)) + body, CHUNKED + b"%x\r\n%s\r\n" % (len(body), body)):
            reader, writer = await connect(port)
            writer.write(sent)
            await writer.drain()
            answer = await reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"body_too_large" in answer
            writer.close()


LARGE = b"x" * (4 * FrontEndConfig().guards.max_body_bytes)


ENDINGS = {
    "sized": (head(len(LARGE)).replace(b"Host", b"Connection: close\r\nHost") + LARGE, b"413"),
    "HTTP/1.0": (head(len(LARGE)).replace(b"1.1", b"1.0") + LARGE, b"413"),
    "chunked": (
        CHUNKED.replace(b"Host", b"Connection: close\r\nHost")
        + b"%x\r\n%s\r\n0\r\n\r\n" % (len(LARGE), LARGE),
        b"413",
    ),
    "large head": (b"GET /health HTTP/1.1\r\nX: " + LARGE, b"431"),
    "no HTTP": (b"nonsense\r\n" + LARGE, b"400"),
    "no chunk": (CHUNKED + b"nonsense\r\n" + LARGE, b"400"),
    "small chunks": (CHUNKED + b"1\r\na\r\n" * 10**6, b"413"),
    "large extension": (CHUNKED + b"1;" + LARGE, b"431"),
}


@pytest.mark.parametrize(
    ("kind", "secure"), [*((kind, False) for kind in ENDINGS), ("sized", True), ("no HTTP", True)]
)
async def test_answer_is_delivered_before_connection_closes(
    app: Any, certified: GuardConfig, kind: str, secure: bool
) -> None:
    sent, status = ENDINGS[kind]
    guards = certified if secure else GuardConfig()

    context = None
    if secure:
        context = ssl.create_default_context(cafile=certified.ssl_certfile)
    async with served(app, guards) as port:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(sent)
            await writer.drain()
            first, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            assert first.split()[1] == status
            assert b"connection: close" in rest
            assert json.loads(await reader.readuntil(b"}}"))["error"]["message"]
            writer.close()


class TestServerWithKeys:
    @pytest.fixture
    def config(self, config: FrontEndConfig) -> FrontEndConfig:
        return msgspec.structs.replace(config, guards=GuardConfig(api_key=("secret",)))

    async def test_client_without_key_gets_error_before_connection_closes(self, app: Any) -> None:
        closing = head(len(LARGE)).replace(b"Host", b"Connection: close\r\nHost") + LARGE

        async with served(app, GuardConfig()) as port:
            for _ in range(12):
                reader, writer = await connect(port)
                writer.write(closing)
                await writer.drain()
                assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 401 ")
                writer.close()


async def test_body_declared_too_large_is_refused_before_upload(app: Any) -> None:
    expecting = head(len(LARGE)).replace(b"Host", b"Expect: 100-continue\r\nHost")

    async with served(app, GuardConfig()) as port:
        reader, writer = await connect(port)
        writer.write(expecting)
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_shutdown_delivers_answer_to_client_that_still_sends(app: Any) -> None:
    async with served_by(app, GuardConfig()) as (server, port):
        reader, writer = await connect(port)
        writer.write(head(len(LARGE)) + LARGE[:1000])
        await reader.readuntil(b"HTTP/1.1 413 ")
        server.end_connections()
        writer.write(LARGE[1000:])
        await writer.drain()
        assert b"body_too_large" in await reader.read()
        writer.close()


async def test_closing_connection_drains_limited_bytes_for_limited_time(app: Any) -> None:
    endless = head(10**9).replace(b"Host", b"Connection: close\r\nHost")

    guards = msgspec.structs.replace(HURRIED, max_body_bytes=2**17)
    async with served_by(app, guards) as (server, port):
        reader, writer = await connect(port)
        writer.write(endless + b"x")
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        await until_async(lambda: not server.server_state.connections, "it is closed")
        writer.close()
        _, sent = await flood(port, endless, b"x" * 4096, most=2**25)
        assert sent < 2**24


@pytest.mark.parametrize("stream", [False, True])
async def test_one_connection_serves_request_after_request(
    app: Any, http: Any, stream: bool
) -> None:
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=PATIENCE)
    async with (
        served(app, GuardConfig(keep_alive_timeout=int(2 * PATIENCE))) as port,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=PATIENCE
        ) as client,
    ):
        ports = set()
        for _ in range(3):
            body = {"prompt": "x", "stream": stream}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
                text = (await response.aread()).decode()
            if stream:
                parts = [event["choices"][0]["text"] for event in http.events(text)]
                assert "".join(parts) == "hello world"
            refused = await client.post("/v1/completions", json={"prompt": ""})
            assert refused.status_code == 400
        assert len(ports) == 1


async def test_pipelined_answer_ends_when_client_disconnects(app: Any, engines: Any) -> None:
    engines.script = lambda stream: []

    async with served(app, GuardConfig()) as port:
        _, writer = await connect(port)
        writer.write((HEAD + BODY) * 3)
        await engines.submitted.wait()
        writer.close()
        await engines.streams[0].closed.wait()
        assert len(engines.streams) == 1


async def test_pipelined_requests_are_counted(app: Any) -> None:
    async with served(app, GuardConfig()) as port:
        reader, writer = await connect(port)
        few = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * MAX_PIPELINED
        writer.write(few)
        for _ in range(MAX_PIPELINED):
            await reader.readuntil(b'"}')
        writer.write(few * 20)
        rest = await reader.read()
        assert rest.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED
        writer.close()


async def test_connections_beyond_limit_close_only_idle_ones(app: Any, engines: Any) -> None:
    engines.script = lambda stream: []

    async with served(app, GuardConfig(max_connections=4)) as port:
        busy = await connect(port)
        busy[1].write(HEAD + BODY)
        await engines.submitted.wait()
        idle = [await connect(port) for _ in range(40)]
        served_late = await connect(port)
        served_late[1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await served_late[0].readuntil(b'"}')
        with contextlib.suppress(ConnectionError):
            assert await idle[0][0].read() == b""
        assert not busy[0].at_eof()
        for _, writer in (busy, served_late, *idle):
            writer.close()


def is_over(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    reader, _ = connection
    return reader.at_eof() or reader.exception() is not None


async def test_a_client_is_answered_despite_hundreds_that_never_finish(
    app: Any, engines: Any
) -> None:
    """Connections that are idle, or have sent part of a header or of a body."""
    begun = (b"", HEAD[:-20], HEAD + BODY[:-1])

    async with served(app, GuardConfig(max_connections=32)) as port:
        others = []
        for number in range(300):
            others.append(await connect(port))
            others[-1][1].write(begun[number % len(begun)])
        reader, writer = await connect(port)
        writer.write(HEAD + BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await until_async(lambda: sum(map(is_over, others)) > 300 - 32, "the others gave way")
        for _, each in (*others, (reader, writer)):
            each.close()


async def test_connections_are_refused_if_all_others_are_active(app: Any, engines: Any) -> None:
    engines.script = lambda stream: []

    async with served(app, GuardConfig(max_connections=2)) as port:
        busy = [await connect(port) for _ in range(2)]
        for _, writer in busy:
            writer.write(HEAD + BODY)
        await until_async(lambda: len(engines.streams) == 2, "both are submitted")
        reader, writer = await connect(port)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        for each in (writer, busy[0][1], busy[1][1]):
            each.close()


async def test_client_sending_byte_by_byte_is_served(app: Any) -> None:
    async with served(app, GuardConfig()) as port:
        reader, writer = await connect(port)
        for byte in HEAD + BODY:
            writer.write(bytes([byte]))
            await writer.drain()
        assert b"[DONE]" in await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()


def hung_up(client: socket.socket) -> bool:
    """Return whether the peer has closed the connection, without reading from it."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)
    return bool(poll.poll(0))


class Flood:
    """A generation client whose engines generate at full speed, even if nothing is read."""

    def __init__(self, engines: Any) -> None:
        self._engines = engines
        self.streams: list[RequestStream] = []
        self.closed = asyncio.Event()
        self.pumps: list[asyncio.Task[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines, name)

    def submit(
        self,
        message: AddRequest,
        pinned_rank: int | None = None,
        unread: UnreadOutputs | None = None,
    ) -> RequestStream:
        stream = RequestStream(message, lambda stream: self.closed.set(), pinned_rank, unread)
        self.streams.append(stream)
        self.pumps.append(asyncio.create_task(self._generate(stream)))
        return stream

    async def _generate(self, stream: RequestStream) -> None:
        while not self.closed.is_set():
            for _ in range(64):
                if not stream.finished:
                    stream.put(RequestOutput(1, [70 + i % 20 for i in range(8)]))
            await asyncio.sleep(0)


class TestReaders:
    @pytest.fixture
    def engines(self, engines: Any) -> Any:
        return Flood(engines)

    async def test_client_that_never_reads_is_disconnected_and_its_engine_freed(
        self, app: Any, engines: Any
    ) -> None:
        async with served(app, GuardConfig(send_timeout=0.3)) as port:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", port))
                client.setblocking(False)
                client.sendall(HEAD + BODY)
                await until_async(engines.closed.is_set, "the stream is closed")
                # It disconnects the client without having sent more than the buffers hold.
                await until_async(lambda: hung_up(client), "the server hangs up")

    @pytest.mark.parametrize("choices", [1, 3])
    async def test_buffer_for_paused_client_is_bounded(
        self, app: Any, engines: Any, choices: int
    ) -> None:
        async with served(app, GuardConfig()) as port:
            reader, writer = await connect(port)
            body = b'{"prompt": "x", "stream": true, "n": %d}' % choices
            writer.write(head(len(body)) + body)
            # uvloop has its own transport classes.
            transport = cast("asyncio.Transport", writer.transport)
            transport.pause_reading()
            await until_async(engines.closed.is_set, "the stream is closed")
            pieces = [each for stream in engines.streams for each in stream._pieces]
            assert sum(len(each.token_ids) for each in pieces) <= MAX_UNREAD + 64 * 8
            transport.resume_reading()
            answer = b""
            while b"client_too_slow" not in answer:
                part = await reader.read(1 << 16)
                assert part, "the connection was closed"
                answer = answer[-500:] + part
            writer.close()
            await writer.wait_closed()


@pytest.fixture
def certified(tmp_path: Path) -> GuardConfig:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(certificate, key)
    return GuardConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key))


async def test_unfinished_handshakes_count_as_connections_and_can_be_closed(
    app: Any, certified: GuardConfig
) -> None:
    trusting = ssl.create_default_context(cafile=certified.ssl_certfile)
    limited = msgspec.structs.replace(certified, max_connections=4)
    async with served(app, limited) as port:
        silent = [await connect(port) for _ in range(9)]
        cut = [asyncio.create_task(reader.read()) for reader, _ in silent]
        done, _ = await asyncio.wait(cut, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 5:
            await asyncio.wait([each for each in cut if each not in done],
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            done = {each for each in cut if each.done()}
        assert {cut.index(each) for each in done} == set(range(5)), "the oldest give way"
        async with httpx.AsyncClient(verify=trusting, timeout=PATIENCE) as client:
            answer = await client.get(f"https://127.0.0.1:{port}/health")
            assert answer.status_code == 200, "one more gave way"
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*cut, return_exceptions=True)


async def test_shutdown_does_not_wait_for_handshakes(app: Any, certified: GuardConfig) -> None:
    async with served(app, certified) as port:
        reader, writer = await connect(port)
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_https_is_served_with_a_certificate(app: Any, certified: GuardConfig) -> None:
    trusting = ssl.create_default_context(cafile=certified.ssl_certfile)
    async with (
        served(app, certified) as port,
        httpx.AsyncClient(verify=trusting, timeout=PATIENCE) as client,
    ):
        answer = await client.get(f"https://127.0.0.1:{port}/health")
        assert answer.status_code == 200
        body = {"prompt": "x", "stream": True}
        url = f"https://127.0.0.1:{port}/v1/completions"
        assert (await client.post(url, json=body)).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_incomplete_handshake_times_out(
    app: Any, certified: GuardConfig, sent: bytes
) -> None:
    async with served(app, msgspec.structs.replace(certified, receive_timeout=0.5)) as port:
        reader, writer = await connect(port)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_connections_end_before_the_server_does() -> None:
    answering, may_end = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/long":
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            answering.set()
            await may_end.wait()
        await send({"type": "http.response.body", "body": b"ended"})

    async with served_by(app, GuardConfig()) as (server, port):
        waiting, its_writer = await connect(port)
        its_writer.write(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n")
        await waiting.readuntil(b"ended\r\n0\r\n\r\n")
        reader, writer = await connect(port)
        writer.write(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        await answering.wait()
        server.end_connections()
        assert await waiting.read() == b""
        later, later_writer = await connect(port)  # it still listens, to reject requests
        later_writer.write(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n")
        await later.readuntil(b"ended\r\n0\r\n\r\n")
        may_end.set()
        answer = await reader.read()
        assert answer.endswith(b"begun\r\n5\r\nended\r\n0\r\n\r\n")
        for each in (its_writer, writer, later_writer):
            each.close()
