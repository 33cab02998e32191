"""A newly started front end answers no request before it knows the engines."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.conftest import FakeGenerationClient

USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"model": "tiny", "messages": [USER], "max_tokens": 5}),
    ],
)
async def test_request_before_engines_are_known_waits_for_them(
    app: FastAPI, engines: FakeGenerationClient, path: str, body: dict[str, Any]
) -> None:
    engines.engines_came.clear()
    engines.ready = False
    serving = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=serving, base_url="http://test") as client:
        answer = asyncio.create_task(client.post(path, json=body))
        told = await client.get("/ready")
        assert (told.status_code, answer.done()) == (503, False)
        engines.ready = True
        engines.engines_came.set()
        assert (await answer).status_code == 200
