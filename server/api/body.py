"""From the bytes of a request body to what they say."""

import asyncio
from collections.abc import Set
from typing import Annotated, TypeVar

import msgspec
import pydantic

from server.api.compatibility import refuse_unserved
from server.errors import invalid, too_complex
from server.http.errors import invalid_body
from server.json_price import TooCostly, checked_parts, costly_field
from server.limits import MAX_PROMPTS, MAX_TOKENS
from server.schema.body import RequestBody

Body = TypeVar("Body", bound=RequestBody)

LARGE = 1 << 16
"""Bytes of a body, and of a list in it, from which on it matters how they are read."""
_PART_BYTES = 1 << 15
"""Of a list that are read in one go, about half a millisecond."""

_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]])
_values = msgspec.json.Decoder(list[msgspec.Raw])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OF_IDS = b"[]0123456789, \t\r\n"


async def read_body(model: type[Body], body: bytes) -> Body:
    """Validate a body; others have their turn between the parts of a large one.

    Raises:
        ApiError: it is no JSON, too many things, not what `model` says, or asks for what is not
            served.
    """
    try:
        # Before anything is made of it: what it would cost is not in its size.
        await _check_price(body)
    except TooCostly as error:
        raise too_complex(error, costly_field(body)) from error
    given = _fields_of_large(body)
    try:
        if given is None:
            found = model.model_validate_json(body)
        else:
            found = await _read_large(model, given)
    except pydantic.ValidationError as error:
        await asyncio.sleep(0)
        raise invalid_body(error, body) from error
    refuse_unserved(model, body if given is None else given)
    return found


async def _check_price(body: bytes) -> None:
    for _ in checked_parts(body):
        await asyncio.sleep(0)


def _fields_of_large(body: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the fields of a large body; None of one that is small, or no object."""
    if len(body) < LARGE:
        return None
    try:
        return _fields.decode(body)
    except (ValueError, RecursionError):
        return None  # pydantic says what is wrong


async def _read_large(model: type[Body], given: dict[str, msgspec.Raw]) -> Body:
    """Validate a large body of these fields.

    Pydantic makes objects of all that it is shown in one go, while nothing else moves. So it is
    shown neither fields that are not known nor long lists of token ids, which are read in parts.

    Raises:
        pydantic.ValidationError: it is not what `model` says.
    """
    ids: dict[str, list[int] | list[list[int]]] = {}
    shown: list[bytes] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key not in given:
            continue
        text = bytes(given[key])
        if name in model.id_fields and len(text) >= LARGE and (found := await _read_ids(text)):
            ids[name] = found
            text = b"[0]" if isinstance(found[0], int) else b"[[0]]"
        shown.append(b"%b:%b" % (msgspec.json.encode(key), text))
    await asyncio.sleep(0)
    body = model.model_validate_json(b"{%b}" % b",".join(shown))
    for name, value in ids.items():
        setattr(body, name, value)
    return body


async def _read_ids(text: bytes) -> list[int] | list[list[int]] | None:
    """Read a list of token ids, or of lists of them; None if it is anything else, or wrong."""
    depth = text.count(b"[")
    if not text.startswith(b"[") or text.translate(None, _OF_IDS) or depth > MAX_PROMPTS + 1:
        return None
    try:
        if depth == 1:
            return await _read_list(text)
        lists = [await _read_list(bytes(each)) for each in _values.decode(text)]
    except ValueError:
        return None
    return lists if all(lists) else None


async def _read_list(text: bytes) -> list[int]:
    """Read a list of token ids in parts."""
    if not text.startswith(b"["):
        raise ValueError("no list")
    found: list[int] = []
    start, end = 1, len(text) - 1
    while start < end:
        comma = text.find(b",", start + _PART_BYTES)
        stop = end if comma < 0 else comma
        found += _ids.decode(b"[%b]" % text[start:stop])
        start = stop + 1
        await asyncio.sleep(0)
    return found


async def fields_of(body: bytes) -> Set[str]:
    """Return the names of a body's fields.

    Raises:
        ApiError: it is no JSON object, or too many things.
    """
    try:
        await _check_price(body)
        return _fields.decode(body).keys()
    except TooCostly as error:
        raise too_complex(error, costly_field(body)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not a valid JSON object: {error}.", code="bad_json") from error
