"""What clients are told when something is wrong: one exception class, one table, one body shape."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import pydantic
import pydantic_core
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from server.access.admission import Overloaded
from server.access.limits import MAX_ERROR_LENGTH
from server.generate.fold import NoRoomInEngine, RequestRefused
from server.http.json_price import TooCostly
from server.router.generation_client import (
    KillsEngines,
    NoEngineAvailable,
    NoSuchEngine,
    ReaderTooSlow,
)

RETRY_AFTER_SECONDS = 1
MESSAGES_PREFIX = "/v1/messages"
"""Paths whose clients know errors in another form than OpenAI's."""


class MessagesErrorDetail(msgspec.Struct):
    """What went wrong, as clients of /v1/messages know it."""

    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    """The body of an error answer to such clients."""

    error: MessagesErrorDetail


class ErrorDetail(msgspec.Struct):
    """What is wrong; `param` names the field that caused it, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Body of every answer that is not a success, and of error events in a stream."""

    error: ErrorDetail


def _shortened(text: str) -> str:
    """Return a text whose middle is left out if it is long: values of the client are quoted."""
    left_out = len(text) - MAX_ERROR_LENGTH
    if left_out <= 0:
        return text
    half = MAX_ERROR_LENGTH // 2
    return f"{text[:half]} ... ({left_out} characters) ... {text[-half:]}"


class ApiError(Exception):
    """An answer with an OpenAI error body; `kind` is the body's `type`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shortened(message)
        self.param = None if param is None else _shortened(param)
        self.code = code
        self.kind = kind
        self.headers = headers

    def body(self, path: str = "") -> bytes:
        """Return the JSON body, as clients of a path know errors."""
        if path.startswith(MESSAGES_PREFIX):
            return msgspec.json.encode(MessagesErrorResponse(message_error(self)))
        detail = ErrorDetail(self.message, self.kind, self.param, self.code)
        return msgspec.json.encode(ErrorResponse(detail))

    def renamed(self, rename: Callable[[str], str]) -> "ApiError":
        """Return the same error with another name of its field, if it has one, in its text too."""
        if self.param is None:
            return self
        param, message = rename(self.param), self.message
        if message.startswith(self.param):
            message = param + message[len(self.param) :]
        return ApiError(
            self.status,
            message,
            param=param,
            code=self.code,
            kind=self.kind,
            headers=self.headers,
        )


def message_error(error: ApiError) -> MessagesErrorDetail:
    """Return an error as clients of /v1/messages know it: its kind follows from the status."""
    kind = _MESSAGES_KINDS.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    return MessagesErrorDetail(kind, error.message)


_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Source: the errors of Anthropic's API."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request cannot be served as it is (400)."""
    return ApiError(400, message, param=param, code=code)


def too_complex(error: TooCostly, param: str | None = None) -> ApiError:
    """A JSON text would make more objects than one request may (400)."""
    what = param or "The body"
    return invalid(f"{what} has {error}.", param, code="body_too_complex")


def model_not_found(name: str) -> ApiError:
    """No served model has this name (404)."""
    return ApiError(
        404, f"The model {name!r} does not exist.", param="model", code="model_not_found"
    )


def context_length_exceeded(
    max_model_len: int, prompt_tokens: int, max_tokens: int, param: str
) -> ApiError:
    """Prompt and completion together do not fit into the model's context (400)."""
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens, but the request needs "
        f"{prompt_tokens + max_tokens}: {prompt_tokens} in the prompt and {max_tokens} for the "
        "completion. Shorten the prompt or lower the number of tokens to generate.",
        param=param,
        code="context_length_exceeded",
    )


def unavailable(message: str) -> ApiError:
    """No engine can serve now (503); the client may try again."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="service_unavailable",
        headers=(("retry-after", str(RETRY_AFTER_SECONDS)),),
    )


def kills_engines(message: str) -> ApiError:
    """The request ended engines (500); clients that know the header do not send it again."""
    return ApiError(
        500,
        message,
        kind="server_error",
        code="request_kills_engines",
        headers=(("x-should-retry", "false"),),
    )


def too_many_requests(error: Overloaded) -> ApiError:
    """The queue is full (429); the client may come again after a while."""
    return ApiError(
        429,
        str(error),
        kind="tokens" if "tokens" in error.what else "requests",
        code="rate_limit_exceeded",
        headers=(("retry-after", str(error.retry_after)),),
    )


def timed_out(message: str) -> ApiError:
    """The request took longer than the server allows (408)."""
    return ApiError(408, message, code="request_timeout", headers=(("connection", "close"),))


def internal() -> ApiError:
    """Something went wrong on our side (500); details are in the log only."""
    return ApiError(
        500, "The server had an error while it processed the request.",
        kind="server_error", code="internal_error",
    )  # fmt: skip


def to_api_error(error: Exception) -> ApiError | None:
    """Return what the client is told, or None for an error that nobody foresaw."""
    match error:
        case ApiError():
            known = error
        case NoSuchEngine():
            header = "X-data-parallel-rank"
            known = invalid(f"The header {header} names no engine: {error}.", header)
        case NoEngineAvailable():
            known = unavailable(str(error) or "No engine can serve the request now; try again.")
        case NoRoomInEngine():
            known = unavailable(str(error))
        case RequestRefused():
            known = invalid(str(error), error.param)
        case KillsEngines():
            known = kills_engines(str(error))
        case Overloaded():
            known = too_many_requests(error)
        case ReaderTooSlow():
            known = ApiError(408, str(error), code="client_too_slow")
        case RequestValidationError():
            known = _first_error(error.errors(), _NOT_AT_HAND)
        case HTTPException():
            known = _http_error(error)
        case _:
            return None
    return known


def _http_error(error: HTTPException) -> ApiError:
    message = {404: "There is no such path.", 405: "The path does not take this method."}.get(
        error.status_code, str(error.detail)
    )
    return ApiError(
        error.status_code,
        message,
        code=HTTPStatus(error.status_code).name.lower(),
        headers=tuple((error.headers or {}).items()),
    )


def invalid_body(error: pydantic.ValidationError, body: bytes) -> ApiError:
    """Turn a failed validation into a 400 that names the field as the client wrote it."""
    details = error.errors(include_url=False, include_input=False)
    if details[0]["type"] == "json_invalid":
        return invalid(
            f"The body is not valid JSON: {details[0]['ctx']['error']}.", code="bad_json"
        )
    return _first_error(details, pydantic_core.from_json(body))


def _first_error(details: Sequence[Any], data: Any) -> ApiError:
    """Describe the first error; where a union failed, the branch that came furthest.

    Locations of failed unions hold names of types between the keys of the data: whatever does
    not lead further into the data is no part of the field's name.
    """
    located = [(*_path(detail, data), detail["msg"]) for detail in details]
    path, branch, message = located[0]
    messages = [message]
    if branch is not None:
        rivals = [item for item in located if item[1] == branch]
        path = max((item[0] for item in rivals), key=_progress)
        messages = [item[2] for item in rivals if item[0] == path]
    param = _field_name(path)
    text = " or: ".join(dict.fromkeys(messages))
    return invalid(f"{param}: {text}" if param else f"The body is wrong: {text}", param)


_Path = tuple[str | int, ...]
_NOT_AT_HAND = object()


def _path(detail: Any, data: Any) -> tuple[_Path, _Path | None]:
    """Return the error's place in the data, and the place of the union that it is a branch of."""
    path: list[str | int] = []
    branched: _Path | None = None
    location = detail["loc"]
    for position, part in enumerate(location):
        missing = detail["type"] == "missing" and position == len(location) - 1
        if data is _NOT_AT_HAND:
            path.append(part)
        elif isinstance(data, dict) and (part in data or missing):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
        elif branched is None:
            branched = tuple(path)
    return tuple(path), branched


def _progress(path: _Path) -> tuple[int, int]:
    """Return how far a branch came: validation of lists stops at the first wrong element."""
    last = path[-1] if path else 0
    return len(path), last if isinstance(last, int) else 0


def _field_name(path: _Path) -> str | None:
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or None
