"""The error responses for clients, and errors that several packages raise."""

from collections.abc import Callable, Iterable, Sequence

import msgspec
from starlette.types import Send

from server.json_price import TooCostly
from server.limits import MAX_ERROR_LENGTH

RETRY_AFTER_SECONDS = 1

_MAX_NAMED = 8
"""Maximum served models listed in an error."""

MESSAGES_PREFIX = "/v1/messages"
"""Path prefix whose clients expect Anthropic's error format instead of OpenAI's."""


class MessagesErrorDetail(msgspec.Struct):
    """Error details in Anthropic's format."""

    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    """Body of an error response in Anthropic's format."""

    error: MessagesErrorDetail


class ErrorDetail(msgspec.Struct):
    """Error details; `param` names the responsible field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Body of every error response, and of error events in a stream."""

    error: ErrorDetail


def _shortened(text: str) -> str:
    """Return a text without its middle if it is long, as it may quote the client's values."""
    if len(text) <= MAX_ERROR_LENGTH:
        return text
    half = MAX_ERROR_LENGTH // 2 - 20  # leaves room for the note between the halves
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


class ApiError(Exception):
    """An error response with an OpenAI body; `kind` is the body's `type`."""

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
        """Return the JSON body in the error format for a path."""
        if path.startswith(MESSAGES_PREFIX):
            return msgspec.json.encode(MessagesErrorResponse(message_error(self)))
        detail = ErrorDetail(self.message, self.kind, self.param, self.code)
        return msgspec.json.encode(ErrorResponse(detail))

    async def send(self, path: str, send: Send) -> None:
        """Send it as the response to an ASGI request."""
        body = self.body(path)
        headers = [(name.encode(), value.encode()) for name, value in self.headers]
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def renamed(self, rename: Callable[[str], str]) -> "ApiError":
        """Return the error with its field renamed, if it has one, also within the message."""
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
    """Return an error in Anthropic's format: its type follows from the status."""
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
"""Error types by status, from the documentation of Anthropic's API."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request is invalid or not supported."""
    return ApiError(400, message, param=param, code=code)


def invalid_field(param: str, why: str, code: str | None = None) -> ApiError:
    """Return a 400: a field of the request is invalid or not supported."""
    return invalid(f"{param}: {why}", param, code)


def element(field: str, index: int, items: Sequence[object]) -> str:
    """Return the name of a field's element, or of the field if that is the only element."""
    return f"{field}[{index}]" if len(items) > 1 else field


def rate_limited(
    message: str, *, kind: str = "invalid_request_error", retry_after: int = RETRY_AFTER_SECONDS
) -> ApiError:
    """Return a 429: a limit is exceeded at the moment; the client can retry."""
    headers = (("retry-after", str(retry_after)),)
    return ApiError(429, message, kind=kind, code="rate_limit_exceeded", headers=headers)


def too_complex(error: TooCostly, param: str | None = None) -> ApiError:
    """Return a 400: a JSON text would create too many objects."""
    what = param or "The body"
    return invalid(f"{what} has {error}.", param, code="body_too_complex")


def model_not_found(name: str, served: Iterable[str]) -> ApiError:
    """Return a 404: no served model has this name."""
    known = sorted(served)
    shown = ", ".join(known[:_MAX_NAMED]) + (", ..." if len(known) > _MAX_NAMED else "")
    text = f"The model {name!r} is not served here. Served: {shown}."
    return ApiError(404, text, param="model", code="model_not_found")


def context_length_exceeded(
    max_model_len: int, prompt_tokens: int, max_tokens: int, param: str
) -> ApiError:
    """Return a 400: prompt and completion together exceed the model's context length."""
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens, but the request needs "
        f"{prompt_tokens + max_tokens}: {prompt_tokens} in the prompt and {max_tokens} for the "
        "completion. Shorten the prompt or lower the number of tokens to generate.",
        param=param,
        code="context_length_exceeded",
    )


def unavailable(message: str) -> ApiError:
    """Return a 503: no engine can serve now; the client can retry."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="service_unavailable",
        headers=(("retry-after", str(RETRY_AFTER_SECONDS)),),
    )


def timed_out(message: str) -> ApiError:
    """Return a 408: the request exceeded the server's timeout."""
    return ApiError(408, message, code="request_timeout", headers=(("connection", "close"),))
