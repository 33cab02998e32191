"""Streams of completions for tests of whole stacks."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from server.bench.client import complete
from server.bench.connection import HttpClient
from server.bench.summary import Record

_STREAM_SECONDS = 600


async def stream_completion(url: str, body: dict[str, Any]) -> Record:
    """POST a streaming completion on a new connection and read it to its end.

    Raises:
        ConnectionError: there was no answer, or the stream ended early or with an error.
    """
    parts = urlsplit(url)
    client = HttpClient(f"{parts.scheme}://{parts.netloc}", keep_alive=False)
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    record = await complete(
        client, parts.path, json.dumps(payload).encode(), stream=True, give_up_after=_STREAM_SECONDS
    )
    if record.error is not None and record.status in (0, 200):
        raise ConnectionError(record.error)
    return record


async def stream_many(url: str, bodies: list[dict[str, Any]], concurrency: int) -> list[Record]:
    """Stream all completions, at most `concurrency` at once; return them in order."""
    slots = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> Record:
        async with slots:
            return await stream_completion(url, body)

    return list(await asyncio.gather(*(one(body) for body in bodies)))
