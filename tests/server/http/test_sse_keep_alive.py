"""A stream sends keep-alive comments before its first token and during pauses."""

import asyncio
import json
import time
from typing import Any

import httpx
import msgspec
import pytest

from engine.shared.messages import RequestOutput
from server.config import FrontEndConfig, GuardConfig
from server.http.call import COMMENT, HEADERS_WITHIN
from server.router.generation_client import NoEngineAvailable
from tests.server.http.test_http_protocol import connect, served
from tests.support.waiting import PATIENCE, until_async

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 9},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "hello", "max_output_tokens": 9},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
FAILED = NoEngineAvailable("The engine is gone.")


def request(path: str) -> bytes:
    body = json.dumps({"model": "tiny", "stream": True, **BODIES[path]}).encode()
    return (
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
    )


class WithInterval:
    INTERVAL = 15.0

    @pytest.fixture
    def config(self, config: FrontEndConfig) -> FrontEndConfig:
        http = msgspec.structs.replace(config.http, sse_keep_alive=self.INTERVAL)
        return msgspec.structs.replace(config, http=http)


class TestWithManyComments(WithInterval):
    INTERVAL = 0.2

    @pytest.mark.parametrize("path", BODIES)
    async def test_comments_are_sent_while_stream_is_idle(
        self, app: Any, engines: Any, path: str
    ) -> None:
        whole = engines.script
        engines.script = lambda stream: []

        async with served(app, GuardConfig()) as port:
            reader, writer = await connect(port)
            writer.write(request(path))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"text/event-stream" in head
            for _ in range(2):
                await reader.readuntil(COMMENT)
            [stream] = engines.streams
            first, *rest = whole(stream)
            stream.feed(first)
            text = b""
            while b"data: " not in text:  # more comments may be on their way already
                text = await reader.readuntil(COMMENT)
            stream.feed(*rest)
            text = await reader.read()
            assert b"data: " in text
            assert text.endswith(b"\n\n\r\n0\r\n\r\n")
            writer.close()

    @pytest.mark.parametrize("path", BODIES)
    async def test_failure_after_headers_is_the_last_event(
        self, app: Any, engines: Any, path: str
    ) -> None:
        engines.script = lambda stream: []

        async with served(app, GuardConfig()) as port:
            reader, writer = await connect(port)
            writer.write(request(path))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            engines.streams[0].feed(FAILED)
            text = await reader.read()
            assert text.count(b"The engine is gone.") == 1
            assert b"[DONE]" not in text
            assert text.endswith(b"\n\n\r\n0\r\n\r\n")
            writer.close()

    @pytest.mark.parametrize("path", BODIES)
    async def test_failure_before_headers_is_an_http_error(
        self, app: Any, engines: Any, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Regardless of the machine's speed.
        monkeypatch.setattr("server.http.call.HEADERS_WITHIN", 2 * PATIENCE)
        engines.script = lambda stream: [FAILED]

        async with served(app, GuardConfig()) as port:
            reader, writer = await connect(port)
            writer.write(request(path))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"The engine is gone." in answer
            writer.close()

    async def test_nothing_is_left_after_client_disconnects(self, app: Any, engines: Any) -> None:
        engines.script = lambda stream: []

        async with served(app, GuardConfig()) as port:
            _, writer = await connect(port)
            writer.write(request("/v1/completions"))
            await engines.submitted.wait()
            writer.close()
            await until_async(engines.streams[0].closed.is_set, "it is aborted")
        await asyncio.sleep(0)
        tasks = [each for each in asyncio.all_tasks() if "send_keep_alive" in repr(each)]
        assert tasks == []

    async def test_unstreamed_answers_have_no_comments(self, app: Any, engines: Any) -> None:
        whole = engines.script
        engines.script = lambda stream: []

        async with (
            served(app, GuardConfig()) as port,
            httpx.AsyncClient(timeout=PATIENCE) as client,
        ):
            url = f"http://127.0.0.1:{port}/v1/completions"
            asked = asyncio.create_task(client.post(url, json={"prompt": "hello"}))
            await engines.submitted.wait()
            await asyncio.sleep(3 * self.INTERVAL)
            [stream] = engines.streams
            stream.feed(*whole(stream))
            assert (await asked).json()["choices"][0]["text"] == "hello world"


class TestWithFewComments(WithInterval):
    async def test_headers_are_sent_after_a_second_without_tokens(
        self, app: Any, engines: Any
    ) -> None:
        engines.script = lambda stream: []

        async with served(app, GuardConfig()) as port:
            reader, writer = await connect(port)
            began = time.monotonic()
            writer.write(request("/v1/completions"))
            await reader.readuntil(b"\r\n\r\n")
            assert time.monotonic() - began > 0.9 * HEADERS_WITHIN
            engines.streams[0].feed(RequestOutput(1, [5], "length"))
            assert b": keep-alive" not in await reader.read()
            writer.close()


class TestWithoutComments(WithInterval):
    INTERVAL = 0.0

    async def test_errors_stay_http_errors_until_the_first_token(
        self, app: Any, engines: Any
    ) -> None:
        engines.script = lambda stream: []

        async with served(app, GuardConfig()) as port:
            reader, writer = await connect(port)
            writer.write(request("/v1/completions"))
            await engines.submitted.wait()
            await asyncio.sleep(1.5 * HEADERS_WITHIN)
            engines.streams[0].feed(FAILED)
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            writer.close()
