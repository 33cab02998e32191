"""A lean HTTP client for load: one raw connection per stream, so that it measures the server."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_READ_SIZE = 1 << 16


@dataclass
class StreamResult:
    """What one streamed completion gave; times in seconds."""

    tokens: int = 0
    first_token: float = 0.0
    total: float = 0.0
    status: int = 0
    finish_reason: str | None = None
    gaps: list[float] = field(default_factory=list)


def _request(url: str, body: dict[str, object]) -> tuple[str, int, bytes]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    payload = json.dumps(body).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return parts.hostname, parts.port or 80, head.encode() + payload


async def stream_completion(url: str, body: dict[str, object]) -> StreamResult:
    """POST a streaming completion and read it to its end; counts tokens by the usage chunk."""
    host, port, request = _request(
        url, {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    result = StreamResult()
    began = last = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=_READ_SIZE)
    try:
        writer.write(request)
        result.status = int((await reader.readline()).split()[1])
        while (await reader.readline()) != b"\r\n":
            pass
        if result.status != 200:
            return result
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if not line:
                raise ConnectionError("the stream ended without [DONE]")
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if not result.first_token:
                result.first_token = now - began
            else:
                result.gaps.append(now - last)
            last = now
            _note(result, line)
        result.total = time.perf_counter() - began
        return result
    finally:
        writer.close()


def _note(result: StreamResult, line: bytes) -> None:
    if b'"finish_reason":null' in line and b'"usage":null' in line:
        return  # an ordinary delta: not worth parsing in a load generator
    chunk = json.loads(line[len(b"data: ") :])
    for choice in chunk["choices"]:
        result.finish_reason = choice["finish_reason"] or result.finish_reason
    if chunk.get("usage"):
        result.tokens = chunk["usage"]["completion_tokens"]


async def stream_many(
    url: str, bodies: list[dict[str, object]], concurrency: int
) -> list[StreamResult]:
    """Stream all completions with at most `concurrency` at once, in order."""
    slots = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, object]) -> StreamResult:
        async with slots:
            return await stream_completion(url, body)

    return list(await asyncio.gather(*(one(body) for body in bodies)))
