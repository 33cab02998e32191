"""Server-sent events as OpenAI-compatible servers send them: bytes in, decoded chunks out."""

import re
from typing import Any

import msgspec

DONE = b"[DONE]"
_LINE_END = re.compile(b"\r\n|\r")


class EventParser:
    """Splits a stream of bytes, cut anywhere, into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that is now complete; comments and names are skipped."""
        data = self._rest + data if self._rest else data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # its \n may come with the next bytes
                data, held = data[:-1], b"\r"
            data = _LINE_END.sub(b"\n", data)
        *blocks, rest = data.split(b"\n\n")
        self._rest = rest + held
        return [payload for block in blocks if (payload := _payload(block)) is not None]


def _payload(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    fields = [line.partition(b":") for line in block.split(b"\n")]
    parts = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
    return b"\n".join(parts) if parts else None


class Message(msgspec.Struct):
    """What a chat chunk adds, or a chat answer says."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """One choice of a chunk or an answer; completions have `text`."""

    text: str = ""
    delta: Message | None = None
    message: Message | None = None
    finish_reason: str | None = None

    @property
    def shows_output(self) -> bool:
        """Whether a client could show something of it: an opening role or an end is not that."""
        said = self.delta or self.message
        if said is None:
            return bool(self.text)
        return bool(said.content or said.reasoning_content or said.reasoning or said.tool_calls)


class Usage(msgspec.Struct):
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """A chunk of a stream or a whole answer; unknown fields are ignored."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
"""Decodes one event or body; raises msgspec.DecodeError."""
