"""Large bodies, of which pydantic is shown no more than it has to see.

It makes objects of all of a body in one go, while nothing else moves. So fields that are not known
are left out, long lists of token ids are read in parts, between which the event loop serves others,
and other long lists of numbers, which are mostly where something else should be, are first tried
with what they begin with.
"""

import asyncio
from typing import Annotated, TypeVar

import msgspec
import pydantic

from server.http.errors import invalid_body
from server.limits import MAX_PROMPTS, MAX_TOKENS
from server.schema.body import RequestBody

Body = TypeVar("Body", bound=pydantic.BaseModel)

LARGE = 1 << 16
"""Bytes of a body, and of a list in it, from which on it matters how they are read."""
_PART_BYTES = 1 << 15
"""Of a list that are read in one go, about half a millisecond."""

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_ids = msgspec.json.Decoder(list[_TokenId])
_id = msgspec.json.Decoder(_TokenId)
_values = msgspec.json.Decoder(list[msgspec.Raw])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OF_LISTS = b"[]0123456789-, \t\r\n"

_Ids = list[int] | list[list[int]]


class _WrongId(Exception):
    """An element of a list is no token id."""

    def __init__(self, index: int, text: bytes) -> None:
        self.index, self.text = index, text


def fields_of_large(body: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the fields of a large body; None of one that is small, or no object."""
    if len(body) < LARGE:
        return None
    try:
        return _fields.decode(body)
    except (ValueError, RecursionError):
        return None  # pydantic says what is wrong


async def read_large(model: type[Body], given: dict[str, msgspec.Raw]) -> Body:
    """Validate a large body of these fields.

    Raises:
        ApiError: it is not what `model` says.
    """
    _check_required(model, given)
    names = {field.alias or name: name for name, field in model.model_fields.items()}
    with_ids = model.id_fields if issubclass(model, RequestBody) else ()
    shown: dict[str, bytes] = {}
    """What pydantic is shown of each field."""
    ids: dict[str, _Ids] = {}
    places: dict[str, str] = {}
    """Where in the body is what is wrong in a list that is shown in part."""
    cut: dict[str, bytes] = {}
    for key in names.keys() & given.keys():
        text = bytes(given[key])
        depth = _depth_of_integers(text) if len(text) >= LARGE else 0
        if depth and names[key] in with_ids:
            try:
                ids[names[key]] = found = await _read_ids(text, depth)
                shown[key] = b"[0]" if isinstance(found[0], int) else b"[[0]]"
            except _WrongId as wrong:
                shown[key] = b"[%s]" % wrong.text if wrong.index == 0 else b"[0,%s]" % wrong.text
                places[f"{key}[{min(wrong.index, 1)}]"] = f"{key}[{wrong.index}]"
            except ValueError:
                shown[key] = text
        elif depth == 1:
            cut[key] = text
            shown[key] = b",".join(text[:_PART_BYTES].split(b",")[:2]) + b"]"
        else:
            shown[key] = text
    order = [key for key in given if key in shown]
    await asyncio.sleep(0)
    found_body = await _validated(model, order, shown, places)
    if cut:
        found_body = await _validated(model, order, shown | cut, places)
    for name, value in ids.items():
        setattr(found_body, name, value)
    await asyncio.sleep(0)
    return found_body


async def _validated(
    model: type[Body], order: list[str], shown: dict[str, bytes], places: dict[str, str]
) -> Body:
    pairs = [b"%s:%s" % (msgspec.json.encode(key), shown[key]) for key in order]
    text = b"{" + b",".join(pairs) + b"}"
    try:
        return model.model_validate_json(text)
    except pydantic.ValidationError as error:
        await asyncio.sleep(0)
        refused = invalid_body(error, text)
        raise refused.renamed(lambda param: places.get(param, param)) from error


def _check_required(model: type[pydantic.BaseModel], given: dict[str, msgspec.Raw]) -> None:
    """Refuse a body without a required field before all of it becomes objects.

    Pydantic would make objects of the whole body for each field that is missing.

    Raises:
        ApiError: as pydantic says it.
    """
    for name, field in model.model_fields.items():
        key = field.alias or name
        if field.is_required() and key not in given:
            error = pydantic.ValidationError.from_exception_data(
                model.__name__, [{"type": "missing", "loc": (key,), "input": None}]
            )
            raise invalid_body(error, b"{}") from error


def _depth_of_integers(text: bytes) -> int:
    """Return 1 for a list of integers, 2 if there are lists in it, 0 for all else."""
    if not text.startswith(b"[") or text.translate(None, _OF_LISTS):
        return 0
    return 1 if text.count(b"[") == 1 else 2


async def _read_ids(text: bytes, depth: int) -> _Ids:
    """Read a list of token ids, or of lists of them.

    Raises:
        _WrongId: an element of a list of token ids is none.
        ValueError: it is wrong otherwise; pydantic says how.
    """
    if depth == 1:
        return await _read_list(text)
    if text.count(b"[") > MAX_PROMPTS + 1:
        raise ValueError("too many lists")
    lists: list[list[int]] = []
    unseen = 0
    for each in _values.decode(text):
        inner = bytes(each)
        unseen += len(inner)
        try:
            lists.append(_ids.decode(inner) if len(inner) < LARGE else await _read_list(inner))
        except _WrongId as wrong:
            raise ValueError("a wrong element") from wrong
        if not lists[-1]:
            raise ValueError("an empty list")
        if unseen > _PART_BYTES:
            unseen = 0
            await asyncio.sleep(0)
    return lists


async def _read_list(text: bytes) -> list[int]:
    """Read a list of token ids in parts.

    Raises:
        _WrongId: an element is none.
    """
    found: list[int] = []
    start, end = 1, len(text) - 1
    while start < end:
        comma = text.find(b",", start + _PART_BYTES)
        stop = end if comma < 0 else comma
        part = b"[" + text[start:stop] + b"]"
        try:
            found += _ids.decode(part)
        except msgspec.ValidationError:
            for index, each in enumerate(_values.decode(part)):
                if not _is_id(each):
                    raise _WrongId(len(found) + index, bytes(each)) from None
        start = stop + 1
        await asyncio.sleep(0)
    return found


def _is_id(text: msgspec.Raw) -> bool:
    try:
        _id.decode(text)
    except msgspec.ValidationError:
        return False
    return True
