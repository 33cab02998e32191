"""From the bytes of a request body to what they say."""

import asyncio
from collections.abc import Set
from typing import TypeVar

import msgspec
import pydantic

from server.api.compatibility import refuse_unserved
from server.api.large_body import fields_of_large, read_large
from server.errors import invalid, too_complex
from server.http.errors import invalid_body
from server.json_price import TooCostly, checked_parts, costly_field

Body = TypeVar("Body", bound=pydantic.BaseModel)


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
    given = fields_of_large(body)
    if given is not None:
        found = await read_large(model, given)
    else:
        try:
            found = model.model_validate_json(body)
        except pydantic.ValidationError as error:
            raise invalid_body(error, body) from error
    refuse_unserved(model, body if given is None else given)
    return found


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
