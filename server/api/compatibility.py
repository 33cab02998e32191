"""Treatment of every request field that clients of OpenAI-compatible servers send.

Supported fields are honoured. Unsupported fields that would change the meaning of a request are
refused by name. Other fields that do not affect the answer, and unknown ones, are ignored. Each
request body declares which of its fields are which (`server.schema.support`).
"""

import logging
import re
from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel

from server.api.chat.schema import BatchChatRequest, ChatCompletionRequest
from server.api.completions.schema import CompletionRequest
from server.api.messages.schema import MessagesRequest
from server.api.responses.schema import ResponsesRequest
from server.errors import invalid, invalid_field
from server.schema.body import RequestBody
from server.schema.support import KEY, Row, Rows

_WRITING: dict[str, type[RequestBody]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
"""Endpoints that generate text: none silently ignores a field of another."""

_UNKNOWN_HERE = "no field of this endpoint"
_HARMLESS = {"user", "stream_options"}
"""Fields of other endpoints that do not affect the answer."""
_ON_BY_ITSELF = {
    "add_generation_prompt", "include_reasoning", "parallel_tool_calls", "skip_special_tokens"
}  # fmt: skip
_NUMBERS_BY_THEMSELVES = {
    "n": 1, "best_of": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    "min_p": 0, "min_tokens": 0,
}  # fmt: skip

_LONGEST_NEUTRAL = 32
"""Maximum bytes of a value that is checked for being a no-op."""
_MAX_LOGGED = 256
"""Maximum number of unknown field names that are logged."""
_LOGGABLE = re.compile(r"[A-Za-z_][\w.-]{0,63}")

logger = logging.getLogger(__name__)
_logged: set[str] = set()
_body = msgspec.json.Decoder(dict[str, msgspec.Raw])


@cache
def rows_of(model: type[BaseModel]) -> Rows:
    """Return the treatment of each field of a body, by name."""
    rows = _own_rows(model)
    if issubclass(model, (*_WRITING.values(), BatchChatRequest)):
        rows |= _foreign(rows)
    return rows


def _own_rows(model: type[BaseModel]) -> Rows:
    rows: Rows = {}
    for kind in reversed(model.__mro__):
        if not issubclass(kind, RequestBody):
            continue
        for name in kind.__annotations__.keys() & kind.model_fields.keys():
            field = kind.model_fields[name]
            extra = field.json_schema_extra
            stated = extra.get(KEY) if isinstance(extra, dict) else None
            row = Row("same") if stated is None else msgspec.convert(stated, Row)
            rows[field.alias or name] = row
        rows |= kind.__dict__.get("undeclared", {})
    return rows


def _foreign(rows: Rows) -> Rows:
    """Return rows for fields of other endpoints."""
    found: Rows = {}
    for path, model in _WRITING.items():
        for name, row in _own_rows(model).items():
            if row.state == "ignored" or name in rows or name in _HARMLESS:
                continue
            served = row.state in ("same", "different")
            if name in found and not (served and found[name].why == _UNKNOWN_HERE):
                continue
            why = f"{_UNKNOWN_HERE}; {path} has it" if served else _UNKNOWN_HERE
            on = name in _ON_BY_ITSELF
            neutral: tuple[Any, ...] = (True,) if on else (False, "", [], {})
            if name in _NUMBERS_BY_THEMSELVES:
                neutral = (_NUMBERS_BY_THEMSELVES[name],)
            found[name] = Row("refused", why, neutral, not on, foreign=True)
    return found


def refuse_unserved(model: type[BaseModel], body: bytes | dict[str, msgspec.Raw]) -> None:
    """Refuse an otherwise valid body with fields that cannot be ignored.

    Args:
        body: raw JSON, or its top-level fields.

    Raises:
        ApiError: there is such a field; `param` names it.
    """
    rows = rows_of(model)
    try:
        given = _body.decode(body) if isinstance(body, bytes) else body
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="bad_json") from error
    for name, value in given.items():
        row = rows.get(name)
        if row is None:
            _log_unknown(name)
        elif row.state == "refused" and not _asks_for_nothing(bytes(value), row):
            raise invalid_field(name, row.why)


def _log_unknown(name: str) -> None:
    """Log once per name that an unknown field was ignored."""
    if name in _logged or len(_logged) >= _MAX_LOGGED or not _LOGGABLE.fullmatch(name):
        return
    _logged.add(name)
    logger.info(
        "ignoring the unknown request field %s (docs/compatibility.md lists known ones)", name
    )


def _asks_for_nothing(text: bytes, row: Row) -> bool:
    if len(text) > _LONGEST_NEUTRAL:
        return False
    value = msgspec.json.decode(text)
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in row.neutral
    )
