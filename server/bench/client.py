"""One completion as its client sees it: what came, when, and what went wrong."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from server.bench.connection import BadAnswer, HttpClient
from server.bench.events import DONE, Chunk, EventParser, decode_chunk

_DETAIL_LENGTH = 300
_STREAM_SECONDS = 600


@dataclass
class StreamResult:
    """What one completion gave; times in seconds from its sending."""

    tokens: int = 0
    """Output tokens, as the server counts them."""
    prompt_tokens: int = 0
    deltas: int = 0
    """Chunks of a stream that held output: a chunk can hold several tokens."""
    first_token: float = 0.0
    """Until the first output; 0 if nothing was streamed."""
    total: float = 0.0
    status: int = 0
    finish_reason: str | None = None
    gaps: list[float] = field(default_factory=list)
    """Times between deltas."""
    error: str | None = None
    """Kind of failure, None for success."""
    detail: str = ""
    """What the server or the system said of the failure."""


class _StreamReader:
    """Turns the bytes of an answer into a result."""

    def __init__(self, result: StreamResult, began: float, stream: bool) -> None:
        self._result = result
        self._began = self._last = self._previous = began
        self._stream = stream
        self._events = EventParser()
        self._whole: list[bytes] = []
        self._first_choice = 0.0
        self._done = False

    def begin(self, status: int) -> None:
        self._result.status = status

    def data(self, body: bytes, now: float) -> None:
        self._last = now
        if not self._stream or self._result.status != 200:
            self._whole.append(body)
            return
        for payload in self._events.feed(body):
            if payload == DONE:
                self._done = True
            else:
                self._take(payload, now)

    def _take(self, payload: bytes, now: float) -> None:
        result = self._result
        try:
            chunk = decode_chunk(payload)
        except msgspec.DecodeError:
            result.error = "malformed_answer"
            return
        self._note(chunk)
        if not chunk.choices:
            return
        self._first_choice = self._first_choice or now
        if not any(choice.shows_output for choice in chunk.choices):
            return
        result.deltas += 1
        if not result.first_token:
            result.first_token = now - self._began
        else:
            result.gaps.append(now - self._previous)
        self._previous = now

    def _note(self, chunk: Chunk) -> None:
        result = self._result
        for choice in chunk.choices:
            result.finish_reason = choice.finish_reason or result.finish_reason
        if chunk.usage is not None:
            result.tokens = chunk.usage.completion_tokens
            result.prompt_tokens = chunk.usage.prompt_tokens
        if chunk.error is not None:
            result.error, result.detail = "error_event", str(chunk.error)[:_DETAIL_LENGTH]

    def end(self) -> None:
        """The answer is complete."""
        result = self._result
        last = self._last if self._last > self._began else time.monotonic()  # no body
        result.total = last - self._began
        if result.status != 200:
            result.error = f"http_{result.status}"
            result.detail = b"".join(self._whole)[:_DETAIL_LENGTH].decode(errors="replace")
        elif not self._stream:
            try:
                self._note(decode_chunk(b"".join(self._whole)))
            except msgspec.DecodeError:
                result.error = "malformed_answer"
        elif not self._done and result.error is None:
            result.error = "stream_cut"
        elif not result.first_token and self._first_choice:
            # Tokens without a text of their own were drawn all the same.
            result.first_token = self._first_choice - self._began


async def complete(
    client: HttpClient,
    path: str,
    body: bytes,
    *,
    stream: bool,
    give_up_after: float,
    result: StreamResult | None = None,
) -> StreamResult:
    """Send one completion and read its answer; failures are part of the result.

    Args:
        body: JSON body, which asks for a stream with usage if `stream`.
        give_up_after: seconds for all of it.
        result: filled while the answer arrives and returned; a new one if absent.
    """
    result = result or StreamResult()
    began = time.monotonic()
    reader = _StreamReader(result, began, stream)
    try:
        async with asyncio.timeout(give_up_after):
            await client.request("POST", path, body, reader)
    except (OSError, BadAnswer) as error:
        result.error, result.detail = _kind_of(error), str(error)
    else:
        reader.end()
        return result
    result.total = time.monotonic() - began
    return result


def _kind_of(error: Exception) -> str:
    for kind, name in (
        (TimeoutError, "timeout"),
        (ConnectionRefusedError, "connection_refused"),
        (ConnectionError, "connection_lost"),
        (OSError, "connection_failed"),
    ):
        if isinstance(error, kind):
            return name
    return "malformed_answer"


async def stream_completion(url: str, body: dict[str, Any]) -> StreamResult:
    """POST a streaming completion on a connection of its own and read it to its end.

    Raises:
        ConnectionError: there was no answer, or the stream ended early or with an error.
    """
    parts = urlsplit(url)
    client = HttpClient(f"{parts.scheme}://{parts.netloc}", keep_alive=False)
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    result = await complete(
        client, parts.path, json.dumps(payload).encode(), stream=True, give_up_after=_STREAM_SECONDS
    )
    if result.error is not None and result.status in (0, 200):
        raise ConnectionError(result.error)
    return result


async def stream_many(
    url: str, bodies: list[dict[str, Any]], concurrency: int
) -> list[StreamResult]:
    """Stream all completions with at most `concurrency` at once, in order."""
    slots = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> StreamResult:
        async with slots:
            return await stream_completion(url, body)

    return list(await asyncio.gather(*(one(body) for body in bodies)))
