"""Streams of completions and chats, event by event, for clients that compare what they are told."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


async def streamed_choices(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[list[dict[str, Any]]]:
    """Send a request that streams and yield the choices of every event, which may be none.

    Raises:
        httpx.HTTPError: the connection failed, or the answer is not a stream.
        ValueError: an event says that the request failed.
        ConnectionError: the stream ended too soon.
    """
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.is_error:
            await response.aread()
            response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"]["message"])
            yield event["choices"]
    raise ConnectionError("the stream ended without [DONE]")


def text_of(choice: dict[str, Any]) -> str:
    """Return what a choice of a streamed completion or chat adds."""
    text: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text or ""
