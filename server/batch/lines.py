"""The lines of batch files, as OpenAI has them: requests, and what came of them."""

import uuid
from typing import Any, Literal

import msgspec

URLS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/pooling",
    "/classify",
)
"""What requests of a batch may ask for."""


def new_id() -> str:
    """Return a name for an attempt to answer a line."""
    return f"batch_req_{uuid.uuid4().hex}"


class BatchRequest(msgspec.Struct, frozen=True):
    """One line of an input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    """JSON of the request's body."""
    method: str = "POST"


class BatchError(msgspec.Struct, frozen=True):
    """Why there is no response."""

    code: str
    message: str


class BatchResponse(msgspec.Struct, frozen=True):
    """What the server answered, success or not."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an output file: either a response or an error."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def outcome(self) -> Literal["answered", "refused", "failed"]:
        """What came of it; only what failed may be answered in another way the next time."""
        status = 503 if self.response is None else self.response.status_code
        if status == 200:
            return "answered"
        return "failed" if status >= 500 or status in (408, 429) else "refused"


class BadLine(ValueError):
    """A line is no request that could be sent."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.error = BatchError(code, message)
        self.custom_id = custom_id


Attempt = BatchRequest | BadLine
"""What a line of the input file is."""

_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(BatchRequest).decode
_decode_result = msgspec.json.Decoder(BatchResult).decode


def read_request(line: bytes) -> BatchRequest:
    """Return the request on a line.

    Raises:
        BadLine: it is none; the reason names what is wrong.
    """
    try:
        request = _decode_request(line)
    except msgspec.ValidationError as error:
        raise BadLine("invalid_request", f"The line is no request: {error}", _name(line)) from error
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"The line is not valid JSON: {error}") from error
    name = request.custom_id
    if request.method != "POST":
        raise BadLine("invalid_method", f"method: {request.method!r} is not POST", name)
    if request.url not in URLS:
        raise BadLine("invalid_url", f"url: {request.url!r} is none of {', '.join(URLS)}", name)
    if not bytes(request.body).startswith(b"{"):
        raise BadLine("invalid_request", "body: must be an object", name)
    if _field(bytes(request.body), "stream"):
        raise BadLine("invalid_request", "body.stream: a batch cannot be streamed", name)
    return request


def _field(text: bytes, name: str) -> Any:
    try:
        decoded = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return decoded.get(name) if isinstance(decoded, dict) else None


def _name(line: bytes) -> str | None:
    name = _field(line, "custom_id")
    return name if isinstance(name, str) else None


def write_result(result: BatchResult) -> bytes:
    """Return the line of a result."""
    return _encode(result) + b"\n"


def read_result(line: bytes) -> BatchResult | None:
    """Return the result on a line; None if the line is damaged, as by a crash."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _decode_result(line)
    except (ValueError, RecursionError):
        return None
