"""What all request bodies are built on."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from server.access.limits import MAX_KEYS, MAX_LIST_LENGTH, MAX_NAME_LENGTH, MAX_TEXT_LENGTH

JsonObject = dict[str, Any]

Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
"""A text that names something."""

_LONGEST = {"str": MAX_TEXT_LENGTH, "list": MAX_LIST_LENGTH, "dict": MAX_KEYS}


def _bound(schema: Any) -> None:
    """Bound what has no bound, in place; descriptions of fields are schemas within schemas."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if isinstance(kind, str) and kind in _LONGEST:
            schema.setdefault("max_length", _LONGEST[kind])
        if kind == "list":
            schema["fail_fast"] = True
        for name, inner in schema.items():
            if name not in ("metadata", "serialization"):
                _bound(inner)
    elif isinstance(schema, (list, tuple)):
        for inner in schema:
            _bound(inner)


def part_type(part: Any) -> str:
    """Tell pieces of messages that refuse from those that say something, by their tags.

    The tags are no names of fields, so that they are told apart where errors are located.
    """
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "a refusal" if kind == "refusal" else "a text"


class RequestBody(BaseModel):
    """Base of all request bodies: JSON types are not converted, unknown fields are ignored.

    Every list, object and text has a largest length, and lists are validated up to their first
    wrong element: an error per element would cost far more than the body.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound(schema)
        return schema
