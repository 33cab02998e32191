"""One completion as its client sees it: what came, when, and what went wrong."""

import asyncio
import time
from array import array

import msgspec

from server.bench.connection import BadAnswer, HttpClient
from server.bench.events import DONE, Chunk, EventParser, decode_chunk
from server.bench.summary import Record

_DETAIL_LENGTH = 300


class _AnswerReader:
    """Turns the bytes of an answer into what is known of its request."""

    def __init__(self, record: Record, stream: bool) -> None:
        self.began = self._last = self._previous = time.monotonic()
        self.gaps = array("f")
        self._record = record
        self._stream = stream
        self._events = EventParser()
        self._whole: list[bytes] = []
        self._first_choice = 0.0
        self._done = False

    def begin(self, status: int) -> None:
        self._record.status = status

    def data(self, body: bytes, now: float) -> None:
        self._last = now
        if not self._stream or self._record.status != 200:
            self._whole.append(body)
            return
        for payload in self._events.feed(body):
            if payload == DONE:
                self._done = True
            else:
                self._take(payload, now)

    def _take(self, payload: bytes, now: float) -> None:
        record = self._record
        try:
            chunk = decode_chunk(payload)
        except msgspec.DecodeError:
            record.error = "malformed_answer"
            return
        self._note(chunk)
        if not chunk.choices:
            return
        self._first_choice = self._first_choice or now
        if not any(choice.shows_output for choice in chunk.choices):
            return
        record.deltas += 1
        if record.first_token is None:
            record.first_token = now - self.began
        else:
            self.gaps.append(now - self._previous)
        self._previous = now

    def _note(self, chunk: Chunk) -> None:
        record = self._record
        for choice in chunk.choices:
            record.finish_reason = choice.finish_reason or record.finish_reason
        if chunk.usage is not None:
            record.output_tokens = chunk.usage.completion_tokens
            record.prompt_tokens = chunk.usage.prompt_tokens
        if chunk.error is not None:
            record.error, record.detail = "error_event", str(chunk.error)[:_DETAIL_LENGTH]

    def end(self) -> None:
        """The answer is complete."""
        record = self._record
        last = self._last if self._last > self.began else time.monotonic()  # no body
        record.total = last - self.began
        if record.status != 200:
            record.error = f"http_{record.status}"
            record.detail = b"".join(self._whole)[:_DETAIL_LENGTH].decode(errors="replace")
        elif not self._stream:
            try:
                self._note(decode_chunk(b"".join(self._whole)))
            except msgspec.DecodeError:
                record.error = "malformed_answer"
        elif not self._done and record.error is None:
            record.error = "stream_cut"
        elif record.first_token is None and self._first_choice:
            # Tokens without a text of their own were drawn all the same.
            record.first_token = self._first_choice - self.began


async def complete(
    client: HttpClient,
    path: str,
    body: bytes,
    *,
    stream: bool,
    give_up_after: float,
    record: Record | None = None,
) -> Record:
    """Send one completion and read its answer; failures are part of the record.

    Args:
        body: JSON body, which asks for a stream with usage if `stream`.
        give_up_after: seconds for all of it.
        record: filled while the answer arrives and returned; a new one if absent.
    """
    record = Record() if record is None else record
    reader = _AnswerReader(record, stream)
    try:
        async with asyncio.timeout(give_up_after):
            await client.request("POST", path, body, reader)
        reader.end()
    except (OSError, BadAnswer, asyncio.CancelledError) as error:
        record.error, record.detail = _kind_of(error), str(error)
        record.total = time.monotonic() - reader.began
        if isinstance(error, asyncio.CancelledError):
            raise
    finally:
        record.gaps = reader.gaps.tobytes()
    return record


def _kind_of(error: BaseException) -> str:
    for kind, name in (
        (asyncio.CancelledError, "cut_off"),
        (TimeoutError, "timeout"),
        (ConnectionRefusedError, "connection_refused"),
        (ConnectionError, "connection_lost"),
        (OSError, "connection_failed"),
    ):
        if isinstance(error, kind):
            return name
    return "malformed_answer"
