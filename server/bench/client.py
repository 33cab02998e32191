"""One completion request as seen by the client: output, timing and errors."""

import asyncio
import re
import time
from array import array
from typing import Any

import msgspec

from server.bench.connection import BadAnswer, HttpClient
from server.bench.summary import Record

_DONE = b"[DONE]"
_LINE_END = re.compile(b"\r\n|\r")
_DETAIL_LENGTH = 300


class EventParser:
    """Incremental parser of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every completed event; comments and event names are skipped."""
        data = self._rest + data if self._rest else data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # its \n may come with the next bytes
                data, held = data[:-1], b"\r"
            data = _LINE_END.sub(b"\n", data)
        *blocks, rest = data.split(b"\n\n")
        self._rest = rest + held
        found = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                found.append(block[6:])
                continue
            fields = [line.partition(b":") for line in block.split(b"\n")]
            parts = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
            if parts:
                found.append(b"\n".join(parts))
        return found


class Message(msgspec.Struct):
    """Content of a chat chunk or of a whole chat answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """One choice of a chunk or answer; completions have `text`."""

    text: str = ""
    delta: Message | None = None
    message: Message | None = None
    finish_reason: str | None = None

    @property
    def shows_output(self) -> bool:
        """Whether it has visible output, not only a role or a finish reason."""
        message = self.delta or self.message
        if message is None:
            return bool(self.text)
        return bool(
            message.content or message.reasoning_content or message.reasoning or message.tool_calls
        )


class Usage(msgspec.Struct):
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """A chunk of a stream, or a whole answer; unknown fields are ignored."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
"""Decodes one event or body; raises msgspec.DecodeError."""


class _Stream:
    """Fills a record from the events of a stream."""

    def __init__(self, record: Record) -> None:
        self.started_at = self._previous = time.monotonic()
        self.gaps = array("f")
        self.first_choice = 0.0
        self.done = False
        self._record = record
        self._events = EventParser()

    def take(self, body: bytes, now: float) -> None:
        record = self._record
        record.status = 200
        for payload in self._events.feed(body):
            if payload == _DONE:
                self.done = True
                continue
            choices = _noted(record, payload)
            if not choices:
                continue
            self.first_choice = self.first_choice or now
            if not any(choice.shows_output for choice in choices):
                continue
            record.deltas += 1
            if record.first_token is None:
                record.first_token = now - self.started_at
            else:
                self.gaps.append(now - self._previous)
            self._previous = now


def _noted(record: Record, payload: bytes | bytearray) -> list[Choice]:
    """Record the data of a chunk or answer; return its choices."""
    try:
        chunk = decode_chunk(payload)
    except msgspec.DecodeError:
        record.error = "malformed_answer"
        return []
    for choice in chunk.choices:
        record.finish_reason = choice.finish_reason or record.finish_reason
    if chunk.usage is not None:
        record.output_tokens = chunk.usage.completion_tokens
        record.prompt_tokens = chunk.usage.prompt_tokens
    if chunk.error is not None:
        record.error, record.detail = "error_event", str(chunk.error)[:_DETAIL_LENGTH]
    return chunk.choices


_KINDS = (
    (asyncio.CancelledError, "cut_off"),
    (TimeoutError, "timeout"),
    (ConnectionRefusedError, "connection_refused"),
    (ConnectionError, "connection_lost"),
    (OSError, "connection_failed"),
    (BadAnswer, "malformed_answer"),
)


async def complete(
    client: HttpClient,
    path: str,
    body: bytes,
    *,
    stream: bool,
    give_up_after: float,
    record: Record | None = None,
) -> Record:
    """Send one completion request and read its answer; failures are part of the record.

    Args:
        body: JSON body, which requests a stream with usage if `stream`.
        give_up_after: total timeout in seconds.
        record: filled while the answer arrives, and returned; a new one if None.
    """
    record = Record() if record is None else record
    reader = _Stream(record)
    try:
        async with asyncio.timeout(give_up_after):
            answer = await client.request(
                "POST", path, body, on_body=reader.take if stream else None
            )
    except (OSError, BadAnswer, asyncio.CancelledError) as error:
        record.error = next(name for kind, name in _KINDS if isinstance(error, kind))
        record.detail = str(error)
        record.total = time.monotonic() - reader.started_at
        if isinstance(error, asyncio.CancelledError):
            raise
        return record
    finally:
        record.gaps = reader.gaps.tobytes()
    record.status, record.total = answer.status, answer.ended - reader.started_at
    if answer.status != 200:
        record.error = f"http_{answer.status}"
        record.detail = answer.body[:_DETAIL_LENGTH].decode(errors="replace")
    elif not stream:
        _noted(record, answer.body)
    elif not reader.done and record.error is None:
        record.error = "stream_cut"
    elif record.first_token is None and reader.first_choice:
        # Tokens without visible text were generated nevertheless.
        record.first_token = reader.first_choice - reader.started_at
    return record
