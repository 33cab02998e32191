"""From the bytes of a request body to what they say."""

import asyncio
from collections.abc import Set
from typing import TypeVar

import msgspec
import pydantic

from server.api.compatibility import refuse_unserved
from server.errors import invalid, too_complex
from server.http.errors import invalid_body
from server.json_price import TooCostly, checked_parts, costly_field

Body = TypeVar("Body", bound=pydantic.BaseModel)

_LARGE = 1 << 16
"""Bytes of a body from which on it matters how often pydantic makes objects of it."""


async def read_body(model: type[Body], body: bytes) -> Body:
    """Validate a body; others have their turn between the parts of a large one.

    Raises:
        ApiError: it is no JSON, too many things, not what `model` says, or asks for what is not
            served.
    """
    try:
        # Before anything is made of it: what it would cost is not in its size.
        await _check_price(body)
        if len(body) >= _LARGE:
            _check_required(model, body)
        found = model.model_validate_json(body)
    except TooCostly as error:
        raise too_complex(error, costly_field(body)) from error
    except pydantic.ValidationError as error:
        raise invalid_body(error, body) from error
    refuse_unserved(model, body)
    return found


def _check_required(model: type[pydantic.BaseModel], body: bytes) -> None:
    """Refuse a body without a required field before all of it becomes objects.

    Pydantic would make objects of the whole body for each field that is missing.

    Raises:
        ValidationError: as pydantic says it.
    """
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return  # pydantic says what is wrong
    for name, field in model.model_fields.items():
        key = field.alias or name
        if field.is_required() and key not in given:
            raise pydantic.ValidationError.from_exception_data(
                model.__name__, [{"type": "missing", "loc": (key,), "input": None}]
            )


async def _check_price(body: bytes) -> None:
    for _ in checked_parts(body):
        await asyncio.sleep(0)


async def fields_of(body: bytes) -> Set[str]:
    """Return the names of a body's fields.

    Raises:
        ApiError: it is no JSON object, or too many things.
    """
    try:
        await _check_price(body)
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except TooCostly as error:
        raise too_complex(error, costly_field(body)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not a valid JSON object: {error}.", code="bad_json") from error
