"""JSON schemas as they are compiled: bounded in what they cost, and without dead ends.

llguidance, which enforces them, lets the output begin a key that matches a pattern even where
`properties` has claimed that key: nothing can follow it then. It ignores what a pattern demands of
a property that is named, and `multipleOf` takes as many states as the number is large.
"""

import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

MAX_SCHEMA_DEPTH = 120
"""Nesting of a schema's objects and arrays; the library reads few more."""
MAX_MULTIPLE = 100_000
"""Sum of a schema's `multipleOf`, each without its decimal point, and their least common multiple
where they may apply to one value."""
MAX_PATTERNS = 64
"""Patterns of a schema's `patternProperties` objects that have properties too."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "items", "prefixItems", "additionalProperties", "additionalItems", "contains", "propertyNames",
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
)  # fmt: skip
_COMBINING = ("allOf", "$ref", "patternProperties")


class BadSchema(ValueError):
    """The schema asks for more than is enforced; the message says what."""


def prepared(
    schema: Any, is_empty: Callable[[str, list[str]], bool], *, lenient: bool = False
) -> Any:
    """Return a schema that allows the same values and has no dead ends.

    Args:
        schema: decoded; left as it is.
        is_empty: whether a pattern matches no keys but those listed.
        lenient: ignore what cannot be enforced instead of refusing it.

    Raises:
        BadSchema: it is nested too deeply, its multiples or patterns cost too much, or a pattern
            forbids keys that others allow.
    """
    objects = list(_objects(schema))
    _check_multiples(objects)
    if not lenient and any(map(_forbids_keys, objects)):
        raise BadSchema("patternProperties: a pattern that forbids keys cannot be enforced")
    both = [each for each in objects if _has_both(each)]
    if not both:
        return schema
    if sum(len(each["patternProperties"]) for each in both) > MAX_PATTERNS:
        raise BadSchema(f"patternProperties beside properties: more than {MAX_PATTERNS} patterns")
    return _prepared(schema, is_empty)


def _prepared(schema: Any, is_empty: Callable[[str, list[str]], bool]) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            changed[keyword] = {name: _prepared(each, is_empty) for name, each in value.items()}
        elif keyword in _SCHEMAS and isinstance(value, list):
            changed[keyword] = [_prepared(each, is_empty) for each in value]
        else:
            changed[keyword] = _prepared(value, is_empty) if keyword in _SCHEMAS else value
    return _without_dead_ends(changed, is_empty) if _has_both(changed) else changed


def _forbids_keys(schema: dict[str, Any]) -> bool:
    patterns = schema.get("patternProperties")
    forbids = isinstance(patterns, dict) and any(each is False for each in patterns.values())
    return forbids and schema.get("additionalProperties") is not False


def _has_both(schema: dict[str, Any]) -> bool:
    maps = (schema.get("properties"), schema.get("patternProperties"))
    return all(isinstance(each, dict) for each in maps)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects within a schema; some of them may be values or maps of schemas."""
    level, depth = [schema], 0
    while level:
        if depth > MAX_SCHEMA_DEPTH:
            raise BadSchema(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                yield each
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level, depth = inner, depth + 1


def _check_multiples(objects: list[dict[str, Any]]) -> None:
    digits = [
        number for each in objects if (number := _without_point(each.get("multipleOf"))) is not None
    ]
    total = sum(digits)
    if any(name in each for each in objects for name in _COMBINING):
        total = max(total, math.lcm(*digits))
    if total > MAX_MULTIPLE:
        raise BadSchema(
            f"multipleOf: {total} states, more than {MAX_MULTIPLE}, for all multiples together"
        )


def _without_point(multiple: Any) -> int | None:
    """Return the digits of a number."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return None
    try:
        digits = Decimal(repr(multiple)).normalize().as_tuple()
        exponent = digits.exponent if isinstance(digits.exponent, int) else 0
        if exponent > len(str(MAX_MULTIPLE)):
            return MAX_MULTIPLE + 1
        number = int("".join(map(str, digits.digits)) or 0)
        return number * 10 ** max(0, exponent) or None
    except (InvalidOperation, ValueError):
        return None


def _without_dead_ends(
    schema: dict[str, Any], is_empty: Callable[[str, list[str]], bool]
) -> dict[str, Any]:
    """Return the schema of an object with only those patterns that other keys may match."""
    properties, patterns = dict(schema["properties"]), schema["patternProperties"]
    names = list(properties)
    kept: dict[str, Any] = {}
    for pattern, wanted in patterns.items():
        for name in names:
            if wanted not in (True, {}) and _matches(pattern, name):
                properties[name] = _both(properties[name], wanted)
        if not is_empty(pattern, names):
            kept[pattern] = wanted
    changed = {**schema, "properties": properties, "patternProperties": kept}
    if not kept:
        del changed["patternProperties"]
    return changed


def _both(first: Any, second: Any) -> Any:
    if first == second or first in (True, {}):
        return second
    return False if second is False else {"allOf": [first, second]}


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return False  # no expression here: the library will say what it thinks of it
