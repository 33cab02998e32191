"""What all request bodies are built on."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from server.limits import MAX_KEYS, MAX_LIST_LENGTH, MAX_NAME_LENGTH, MAX_TEXT_LENGTH, MAX_TOKENS
from server.schema.support import Rows

JsonObject = dict[str, Any]

Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
"""A text that names something."""

Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Alternatives = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
"""How many tokens; -1 stands for all there are."""

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


def type_of(part: Any) -> str:
    """Return what a part or item says its `type` is; "" if it says nothing.

    Of a long text it is the beginning, since errors repeat it several times.
    """
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return kind[:_LONGEST_TYPE] if isinstance(kind, str) else ""


_LONGEST_TYPE = 100


def part_type(part: Any) -> str:
    """Tell texts, refusals and media apart, by their tags.

    The tags are no names of fields, so that they are told apart where errors are located.
    """
    kind = type_of(part)
    if kind == "refusal":
        return "a refusal"
    return "media" if kind in _MEDIA else "a text"


_MEDIA = frozenset(
    ("image_url", "image", "video_url", "video", "audio_url", "file",
     "input_image", "input_file", "input_audio")
)  # fmt: skip


class RequestBody(BaseModel):
    """Base of all request bodies: JSON types are not converted, unknown fields are ignored.

    Every list, object and text has a largest length, and lists are validated up to their first
    wrong element: an error per element would cost far more than the body.
    """

    undeclared: ClassVar[Rows] = {}
    """What is known of fields that are not declared here, and of inherited ones that are refused.
    """
    id_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that take token ids, or lists of them, as many as a body holds."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound(schema)
        return schema
