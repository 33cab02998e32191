"""Bodies with extreme values, generated from the OpenAPI document.

Every field of every operation gets values at its bounds, beyond them, and of wrong types, one field
at a time in an otherwise valid body; new fields and endpoints are covered automatically.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Schema = dict[str, Any]

LARGE = 3 * 2**20
"""Size of large bodies in bytes, slightly below the server's limit."""
DEEP = 20_000
"""Nesting depth of arrays and objects."""
_LEVELS = 8
"""Maximum depth of fields within fields."""

_NUMBERS = ["-1", "0", "1e308", "-1e308", "1e-320", "true", '"1"']
_INTEGERS = [
    str(2**31),
    str(2**62),
    str(2**63),
    str(-(2**63) - 1),
    str(10**30),
    "1" * 4000,
    "1.5",
]


class Body(NamedTuple):
    """One request body."""

    name: str
    """The field and its value, e.g. `messages[].content: 3145728 characters`."""
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """JSON, or text that resembles it."""
        return "".join(self.parts)


Value = tuple[str, ...]
"""JSON text in pieces, joined when sent: most are megabytes, and only some may be sent."""


def bodies(schema: Schema, document: Schema, rights: Sequence[dict[str, Any]]) -> Iterator[Body]:
    """Yield bodies for an operation with this request schema.

    Args:
        schema: schema of the operation's body, with references into the document.
        document: the OpenAPI document.
        rights: minimal bodies that the operation accepts: at least one for each variant of the
            schema, whose fields it has.

    Raises:
        ValueError: a variant has no such body.
    """
    for name, value in _values(schema, document, _LEVELS):
        if not name:
            yield Body(f"body: {value[0][:20]}", value)
    for variant in _variants(_resolve(schema, document)) or [schema]:
        fields = _resolve(variant, document).get("properties", {})
        fitting = [right for right in rights if right.keys() <= fields.keys()]
        if not fitting:
            raise ValueError(f"no right body for {variant}")
        for right in fitting:
            yield from _of_fields(fields, document, right)


def _of_fields(fields: Schema, document: Schema, right: dict[str, Any]) -> Iterator[Body]:
    """Yield the valid body with each field's extreme values in turn."""
    for field, of_field in fields.items():
        rest = json.dumps({key: value for key, value in right.items() if key != field})[1:-1]
        comma = ", " if rest else ""
        for path, value in _values(of_field, document, _LEVELS):
            size = sum(map(len, value))
            label = f"{size} bytes" if size > 60 else "".join(value)
            start = f"{{{rest}{comma}{json.dumps(field)}: "
            yield Body(f"{field}{path}: {label}", (start, *value, "}"))


def _variants(schema: Schema) -> list[Schema]:
    """Return the alternatives that a schema consists of, if any."""
    return schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []


def _resolve(schema: Schema, document: Schema) -> Schema:
    while "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def _values(schema: Schema, document: Schema, levels: int) -> Iterator[tuple[str, Value]]:
    """Yield (path within the field, value)."""
    schema = _resolve(schema, document)
    variants = _variants(schema)
    if variants:
        for variant in variants:
            yield from _values(variant, document, levels)
        return
    yield from (("", (text,)) for text in _wrong())
    match schema.get("type"):
        case "integer":
            yield from (("", (text,)) for text in [*_NUMBERS, *_INTEGERS, *_bounds(schema)])
        case "number":
            yield from (("", (text,)) for text in [*_NUMBERS, *_bounds(schema)])
        case "string":
            yield from (("", (text,)) for text in _strings(schema))
        case "array":
            yield from _arrays(schema, document, levels)
        case "object":
            yield from _objects(schema, document, levels)


@functools.cache
def _wrong() -> list[str]:
    """Values that most fields reject: empty ones of each type, and three oversized ones."""
    many = LARGE // 2
    return [
        "[]",
        "{}",
        '""',
        "[" + "0," * (many - 1) + "0]",
        _nested("[", "]"),
        _nested('{"a":', "}"),
    ]


def _nested(opening: str, closing: str) -> str:
    return opening * DEEP + "0" + closing * DEEP


def _bounds(schema: Schema) -> list[str]:
    found = []
    for key, step in (("minimum", -1), ("maximum", 1), ("exclusiveMaximum", 0)):
        if key in schema:
            found += [json.dumps(schema[key]), json.dumps(schema[key] + step)]
    return found


def _strings(schema: Schema) -> Iterator[str]:
    longest = schema.get("maxLength")
    if longest is not None and longest <= LARGE:  # no body is longer
        yield from _around(longest)
    yield from _large_strings()


@functools.cache
def _around(longest: int) -> list[str]:
    return [json.dumps("a" * longest), json.dumps("a" * (longest + 1))]


@functools.cache
def _large_strings() -> list[str]:
    return [
        json.dumps("a" * LARGE),
        '"' + "\\u0000" * (LARGE // 6) + '"',
        json.dumps("[" * (LARGE // 4)),
        json.dumps("a " * 20_000),
        '"\\ud800"',
        '"\U0001f3ad"',
    ]


def _arrays(schema: Schema, document: Schema, levels: int) -> Iterator[tuple[str, Value]]:
    items = schema.get("items", {})
    simple = _simple(items, document)
    max_items = schema.get("maxItems")
    numbers = {LARGE // (len(simple) + 1), 1000}
    if max_items is not None:
        numbers |= {max_items, max_items + 1}
    for number in sorted(numbers):
        if number * (len(simple) + 1) <= LARGE + 2**20:
            yield "", (_repeated(simple, number),)
    if levels:
        for path, value in _values(items, document, levels - 1):
            yield f"[]{path}", ("[", *value, "]")


@functools.cache
def _repeated(element: str, number: int) -> str:
    return "[" + ",".join([element] * number) + "]"


def _objects(schema: Schema, document: Schema, levels: int) -> Iterator[tuple[str, Value]]:
    yield from (("", (text,)) for text in _large_objects())
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and levels:
        for path, value in _values(values, document, levels - 1):
            yield f"{{}}{path}", ('{"1": ', *value, "}")
    if not levels:
        return
    fields = schema.get("properties", {})
    right = {name: _simple(fields[name], document) for name in schema.get("required", ())}
    for name, of_field in fields.items():
        others = [f"{json.dumps(key)}: {text}" for key, text in right.items() if key != name]
        start = "{" + "".join(f"{other}, " for other in others) + f"{json.dumps(name)}: "
        for path, value in _values(of_field, document, levels - 1):
            yield f".{name}{path}", (start, *value, "}")


@functools.cache
def _large_objects() -> list[str]:
    number = LARGE // 14
    return [
        "{" + ",".join(f'"k{index:06}":0' for index in range(number)) + "}",
        json.dumps({"k" * (LARGE // 2): 0}),
    ]


def _simple(schema: Schema, document: Schema) -> str:
    """Return a small value that matches a schema."""
    schema = _resolve(schema, document)
    variants = _variants(schema)
    if variants:
        return _simple(variants[0], document)
    if "const" in schema or "enum" in schema:
        return json.dumps(schema["const"] if "const" in schema else schema["enum"][0])
    kind = schema.get("type")
    if kind == "array":
        return f"[{_simple(schema.get('items', {}), document) if 'minItems' in schema else ''}]"
    if kind == "object":
        fields = schema.get("properties", {})
        required = (
            f'"{name}": {_simple(fields[name], document)}' for name in schema.get("required", ())
        )
        return "{" + ", ".join(required) + "}"
    return {"string": '"a"', "boolean": "true"}.get(
        kind or "", json.dumps(max(1, schema.get("minimum", 1)))
    )
