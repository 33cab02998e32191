"""Bodies of maximum size, full of values that are cheap to send and expensive to hold."""

from collections.abc import Iterator

from benchmarks.hostile.requests import Request
from server.limits import MAX_JSON_CONTAINERS, MAX_JSON_VALUES, MAX_MESSAGES

SIZE = 4 * 2**20
"""Size of a body in bytes, the server's limit."""
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/conversations",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
)

_MESSAGE = b'{"role":"user","content":""},'


def large_requests() -> Iterator[Request]:
    """Yield each body for every path, and texts too long for any model to be tokenized."""
    for name, body in _bodies().items():
        for path in PATHS:
            yield Request(f"{path} {name}", path, body)
    for name, piece in _TEXTS.items():
        yield Request(f"/tokenize {name}", "/tokenize", _filled(b'{"prompt":"', piece, b'"}'))


def _filled(start: bytes, piece: bytes, end: bytes, count: int = SIZE) -> bytes:
    """Return a body of `count` pieces, or as many as the size limit allows."""
    count = min(count, (SIZE - len(start) - len(end)) // len(piece) - 1)
    return start + piece * count + piece.rstrip(b",") + end


def _bodies() -> dict[str, bytes]:
    ids, nested = MAX_JSON_VALUES - 10, MAX_JSON_CONTAINERS - 10
    return {
        "zeros as messages": _filled(b'{"messages":[', b"0,", b"]}"),
        "zeros as input": _filled(b'{"input":[', b"0,", b"]}"),
        "token ids": _filled(b'{"prompt":[', b"300,", b"]}", ids),
        "token ids to decode": _filled(b'{"tokens":[', b"300,", b"]}", ids),
        "wrong token ids": _filled(b'{"prompt":[', b"-1,", b"]}", ids),
        "lists of token ids": _filled(b'{"prompt":[', b"[1],", b"]}", 2000),
        "messages": _filled(b'{"messages":[', _MESSAGE, b"]}", MAX_MESSAGES - 1),
        "too many messages": _filled(b'{"messages":[', _MESSAGE, b"]}"),
        "unknown objects": _filled(b'{"prompt":"x","y":[', b"{},", b"]}", nested),
        "unknown texts": _filled(b'{"prompt":"x","y":[', b'"a,b",', b"]}", MAX_JSON_VALUES // 2),
        "nested": b'{"messages":' + b"[" * (SIZE - 100),
        "template arguments": _filled(
            b'{"messages":[{"role":"user","content":""}],"chat_template_kwargs":{"a":[',
            b'{"":0},', b"]}}", nested,
        ),
    }  # fmt: skip


_TEXTS = {
    "backslashes": b"\\\\",
    "words": b"qxzj ",
    "ideographs": "語".encode(),
    "one word": b"a",
    "blanks": b" ",
}
