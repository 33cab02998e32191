import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn

from tests.support.waiting import until_async

GUARD_SECONDS = 60


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an app on a free port of this process."""
    server = uvicorn.Server(
        uvicorn.Config(
            app, http="httptools", log_level="warning", lifespan="off",
            timeout_keep_alive=2 * GUARD_SECONDS,
        )
    )  # fmt: skip
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@pytest.mark.parametrize("stream", [False, True])
async def test_one_connection_serves_request_after_request(
    app: Any, http: Any, stream: bool
) -> None:
    limits = httpx.Limits(
        max_connections=1, max_keepalive_connections=1, keepalive_expiry=GUARD_SECONDS
    )
    async with (
        asyncio.timeout(GUARD_SECONDS),
        served(app) as url,
        httpx.AsyncClient(base_url=url, limits=limits, timeout=GUARD_SECONDS) as client,
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


async def test_a_closed_connection_frees_the_engine(app: Any, engines: Any) -> None:
    engines.script = lambda stream: []

    async with asyncio.timeout(GUARD_SECONDS), served(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=GUARD_SECONDS) as client:
            call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            await engines.submitted.wait()
            await until_async(lambda: engines.streams[0].is_awaited, "its tokens are waited for")
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
        await engines.streams[0].closed.wait()
