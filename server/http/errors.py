"""Conversion of exceptions and unknown paths to the errors that clients see."""

import logging
from collections.abc import Collection, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import Any

import msgspec
import pydantic
import pydantic_core
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.shared.fair_threads import QueueFull
from server.access.admission import Overloaded
from server.errors import ApiError, invalid, rate_limited, unavailable
from server.generate.fold import NoRoomInEngine, RequestRefused
from server.router.generation_client import KillsEngines, NoEngineAvailable, NoSuchEngine
from server.router.token_stream import ReaderTooSlow

logger = logging.getLogger(__name__)


def client_error(error: Exception, request_id: str) -> ApiError:
    """Return the client's error for an exception; unexpected ones are logged."""
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
            stop = (("x-should-retry", "false"),)  # clients that know it do not retry
            known = ApiError(
                500,
                str(error),
                kind="server_error",
                code="request_kills_engines",
                headers=stop,
            )
        case Overloaded():
            kind = "tokens" if "tokens" in error.what else "requests"
            known = rate_limited(str(error), kind=kind, retry_after=error.retry_after)
        case QueueFull():
            known = rate_limited(str(error), kind="requests")
        case ReaderTooSlow():
            known = ApiError(408, str(error), code="client_too_slow")
        case RequestValidationError():
            known = _first_error(error.errors(), None)
        case HTTPException():
            plain = {404: "Not Found.", 405: "Method Not Allowed."}
            known = ApiError(
                error.status_code,
                plain.get(error.status_code, str(error.detail)),
                code=HTTPStatus(error.status_code).name.lower(),
                headers=tuple((error.headers or {}).items()),
            )
        case _:
            logger.error(
                "request %s failed", request_id, exc_info=error, extra={"request_id": request_id}
            )
            text = "The server had an error while it processed the request."
            known = ApiError(500, text, kind="server_error", code="internal_error")
    return known


def invalid_body(error: pydantic.ValidationError, body: bytes) -> ApiError:
    """Convert a failed validation to a 400 that names the field as in the client's body."""
    details = error.errors(include_url=False, include_input=False)
    if details[0]["type"] == "json_invalid":
        return invalid(
            f"The body is not valid JSON: {details[0]['ctx']['error']}.", code="bad_json"
        )
    try:
        data = _Value(body.lstrip())
    except ValueError:  # pydantic accepts numbers that are not valid JSON
        data = _Value(msgspec.json.encode(pydantic_core.from_json(body)))
    return _first_error(details, data)


class _Value:
    """A value of a body, decoded lazily along the path of an error.

    This avoids decoding a large body to objects a second time just to report an error.

    Raises:
        ValueError: it is not JSON.
    """

    def __init__(self, text: bytes | msgspec.Raw) -> None:
        self._text = text
        self._inner: dict[str | int, _Value] = {}
        start = bytes(memoryview(text)[:1])
        self.is_array, self.is_object = start == b"[", start == b"{"
        self._fields = _fields.decode(text) if self.is_object else {}

    def has(self, part: str | int) -> bool:
        """Return whether a part of an error's location exists in this value."""
        return isinstance(part, int) if self.is_array else part in self._fields

    def get(self, part: str | int) -> "_Value":
        """Return the value at a part of an error's location."""
        if part not in self._inner:
            found = self._elements[part] if isinstance(part, int) else self._fields[part]
            self._inner[part] = _Value(found)
        return self._inner[part]

    @cached_property
    def _elements(self) -> list[msgspec.Raw]:
        return msgspec.json.decode(self._text, type=list[msgspec.Raw])


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _first_error(details: Sequence[Any], data: _Value | None) -> ApiError:
    """Describe the first error; for a failed union, that of the branch that got furthest.

    Locations of failed unions contain type names between the data's keys: parts that do not exist
    in the data are not part of the field's name.
    """
    located = [(*_path(detail, data), _message(detail), detail["type"]) for detail in details]
    path, branch, message, _ = located[0]
    messages = [message]
    if branch is not None:
        rivals = [item for item in located if item[1] == branch]
        # A list that is only too long got further than any list with a wrong element.
        long = [item for item in rivals if item[0] == branch and item[3] == "too_long"]
        rivals = long or rivals
        path = max((item[0] for item in rivals), key=_progress)
        messages = [item[2] for item in rivals if item[0] == path]
    param = ""
    for part in path:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    first, *others = dict.fromkeys(messages)
    text = ", or ".join([first, *(each.removeprefix("must be ") for each in others)])
    return invalid(f"{param}: {text}" if param else f"The body is wrong: {text}", param or None)


def _message(detail: Any) -> str:
    form = _SENTENCES.get(detail["type"])
    if form is None:
        return str(detail["msg"])
    values: dict[str, Any] = detail.get("ctx", {})
    if values.get("min_length") == 1:
        return "must not be empty"
    whole = {
        name: int(value)
        for name, value in values.items()
        if isinstance(value, float) and value.is_integer()
    }
    return form.format_map({**values, **whole})


_SENTENCES = {
    "missing": "is required",
    "none_required": "must be null",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_long": "must have at most {max_length} elements",
    "too_short": "must have at least {min_length} elements",
    "union_tag_invalid": "the type {tag!r} is none of {expected_tags}",
    "extra_forbidden": "is not known",
}
"""Messages, by pydantic's error type."""

_Path = tuple[str | int, ...]


def _path(detail: Any, data: _Value | None) -> tuple[_Path, _Path | None]:
    """Return the error's path in the data, and that of the union it is a branch of.

    Without data, parts cannot be checked and all count as keys.
    """
    path: list[str | int] = []
    branched: _Path | None = None
    *inner, last = detail["loc"] or (None,)
    for part in inner:
        if data is None or data.has(part):
            path.append(part)
            data = None if data is None else data.get(part)
        elif branched is None:
            branched = tuple(path)
    if last is None:
        return (), None
    missing = detail["type"] == "missing"
    if data is None or data.has(last) or (missing and data.is_object):
        path.append(last)
    elif branched is None:
        branched = tuple(path)
    return tuple(path), branched


def _progress(path: _Path) -> tuple[int, int]:
    """Return a sort key for how far a branch got: lists stop at the first wrong element."""
    last = path[-1] if path else 0
    return len(path), last if isinstance(last, int) else 0


_LONGEST = 200
"""Maximum characters of a path for which similar paths are suggested."""
_NOT_SERVED = {
    "/v1/audio": "Speech and transcription",
    "/v1/images": "Images",
    "/v1/videos": "Videos",
    "/v1/realtime": "The realtime API",
    "/v1/files": "Files",
    "/v1/uploads": "Uploads",
    "/v1/batches": "Batches (`swell run-batch` takes files of requests)",
    "/v1/messages/batches": "Batches (`swell run-batch` takes files of requests)",
    "/v1/assistants": "The assistants API (use /v1/responses)",
    "/v1/threads": "The assistants API (use /v1/responses)",
    "/v1/vector_stores": "Vector stores",
    "/v1/fine_tuning": "Fine-tuning",
    "/v1/moderations": "Moderation",
    "/v1/complete": "Anthropic's text completions (use /v1/messages)",
    "/v1beta": "Gemini's API (use /v1/chat/completions)",
    "/api": "Ollama's API (use /v1/chat/completions)",
}
"""Path prefixes of other APIs, and their names."""


def no_such_path(path: str, served: Collection[str]) -> str:
    """Return the message for an unknown path, with a suggestion if there is a similar one."""
    path = path.rstrip("/")
    for prefix, what in _NOT_SERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return f"{what}: not served here."
    import difflib  # takes milliseconds to import and is needed for mistakes only

    near = difflib.get_close_matches(path, served, 1) if len(path) <= _LONGEST else []
    if near:
        return f"Not Found. Did you mean {near[0]}?"
    return "Not Found. /docs lists the paths."
