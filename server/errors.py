"""The error that clients see, and the ones that several packages raise."""

from collections.abc import Callable, Iterable, Sequence

import msgspec
from starlette.types import Send

from server.json_price import TooCostly
from server.limits import MAX_ERROR_LENGTH

RETRY_AFTER_SECONDS = 1

_MAX_NAMED = 8
"""Served models that an error names."""

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

    async def send(self, path: str, send: Send) -> None:
        """Answer an ASGI request with it."""
        body = self.body(path)
        headers = [(name.encode(), value.encode()) for name, value in self.headers]
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

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


def invalid_field(param: str, why: str, code: str | None = None) -> ApiError:
    """A field of the request cannot be served as it is (400)."""
    return invalid(f"{param}: {why}", param, code)


def element(field: str, index: int, items: Sequence[object]) -> str:
    """Return the name of an element of a field, which is the field's own if it is the only one."""
    return f"{field}[{index}]" if len(items) > 1 else field


def rate_limited(
    message: str, *, kind: str = "invalid_request_error", retry_after: int = RETRY_AFTER_SECONDS
) -> ApiError:
    """There is too much of something now (429); the client may try again."""
    headers = (("retry-after", str(retry_after)),)
    return ApiError(429, message, kind=kind, code="rate_limit_exceeded", headers=headers)


def too_complex(error: TooCostly, param: str | None = None) -> ApiError:
    """A JSON text would make more objects than one request may (400)."""
    what = param or "The body"
    return invalid(f"{what} has {error}.", param, code="body_too_complex")


def model_not_found(name: str, served: Iterable[str]) -> ApiError:
    """No served model has this name (404)."""
    known = sorted(served)
    shown = ", ".join(known[:_MAX_NAMED]) + (", ..." if len(known) > _MAX_NAMED else "")
    text = f"The model {name!r} is not served here. Served: {shown}."
    return ApiError(404, text, param="model", code="model_not_found")


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


def timed_out(message: str) -> ApiError:
    """The request took longer than the server allows (408)."""
    return ApiError(408, message, code="request_timeout", headers=(("connection", "close"),))


def internal() -> ApiError:
    """Something went wrong on our side (500); details are in the log only."""
    return ApiError(
        500, "The server had an error while it processed the request.",
        kind="server_error", code="internal_error",
    )  # fmt: skip
