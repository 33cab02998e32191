"""Bodies with the largest, deepest and most numerous values, made up from the OpenAPI document.

Every field of every operation gets values at its bounds, beyond them, and of the wrong kind, one
field at a time in a body that is right otherwise; a new field or endpoint needs nothing here.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

Schema = dict[str, Any]

LARGE = 3 * 2**20
"""Bytes of the bodies that are meant to be large; the server's own bound is not much higher."""
DEEP = 20_000
"""Levels of nested arrays and objects."""
_LEVELS = 4
"""How deep fields within fields are looked for."""

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
    """The field and what is wrong with it, e.g. `messages[].content: 3145728 characters`."""
    text: str
    """JSON, or something that is meant to look like it."""


def bodies(schema: Schema, document: Schema, right: dict[str, Any]) -> Iterator[Body]:
    """Yield bodies for an operation whose requests look like `schema`.

    Args:
        schema: of the operation's body, with references into the document.
        document: the OpenAPI document.
        right: a body that the operation accepts, as small as possible.
    """
    for name, text in _values(schema, document, _LEVELS):
        if not name:
            yield Body(f"body: {text[:20]}", text)
    fields = _resolve(schema, document).get("properties", {})
    for field, of_field in fields.items():
        rest = json.dumps({key: value for key, value in right.items() if key != field})[1:-1]
        comma = ", " if rest else ""
        for path, text in _values(of_field, document, _LEVELS):
            told = f"{len(text)} bytes" if len(text) > 60 else text
            yield Body(f"{field}{path}: {told}", f"{{{rest}{comma}{json.dumps(field)}: {text}}}")


def _resolve(schema: Schema, document: Schema) -> Schema:
    while "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def _values(schema: Schema, document: Schema, levels: int) -> Iterator[tuple[str, str]]:
    """Yield (where in the field, its value as JSON text)."""
    schema = _resolve(schema, document)
    variants = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if variants:
        for variant in variants:
            yield from _values(variant, document, levels)
        return
    yield from (("", text) for text in _wrong())
    match schema.get("type"):
        case "integer":
            yield from (("", text) for text in [*_NUMBERS, *_INTEGERS, *_bounds(schema)])
        case "number":
            yield from (("", text) for text in [*_NUMBERS, *_bounds(schema)])
        case "string":
            yield from (("", text) for text in _strings(schema))
        case "array":
            yield from _arrays(schema, document, levels)
        case "object":
            yield from _objects(schema, document, levels)


@functools.cache
def _wrong() -> list[str]:
    """Values that few fields take: of each kind one, and three that are too much of one."""
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
        yield json.dumps("a" * longest)
        yield json.dumps("a" * (longest + 1))
    yield from _large_strings()


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


def _arrays(schema: Schema, document: Schema, levels: int) -> Iterator[tuple[str, str]]:
    items = schema.get("items", {})
    simple = _simple(items, document)
    most = schema.get("maxItems")
    numbers = {LARGE // (len(simple) + 1), 1000}
    if most is not None:
        numbers |= {most, most + 1}
    for number in sorted(numbers):
        if number * (len(simple) + 1) <= LARGE + 2**20:
            yield "", "[" + ",".join([simple] * number) + "]"
    if levels:
        for path, text in _values(items, document, levels - 1):
            yield f"[]{path}", f"[{text}]"


def _objects(schema: Schema, document: Schema, levels: int) -> Iterator[tuple[str, str]]:
    yield from (("", text) for text in _large_objects())
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and levels:
        for path, text in _values(values, document, levels - 1):
            yield f"{{}}{path}", f'{{"1": {text}}}'
    if not levels:
        return
    fields = schema.get("properties", {})
    right = {name: _simple(fields[name], document) for name in schema.get("required", ())}
    for name, of_field in fields.items():
        others = [f"{json.dumps(key)}: {text}" for key, text in right.items() if key != name]
        for path, text in _values(of_field, document, levels - 1):
            yield f".{name}{path}", "{" + ", ".join([*others, f"{json.dumps(name)}: {text}"]) + "}"


@functools.cache
def _large_objects() -> list[str]:
    number = LARGE // 14
    return [
        "{" + ",".join(f'"k{index:06}":0' for index in range(number)) + "}",
        json.dumps({"k" * (LARGE // 2): 0}),
    ]


def _simple(schema: Schema, document: Schema) -> str:
    """Return a small value that fits a schema."""
    schema = _resolve(schema, document)
    variants = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
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
