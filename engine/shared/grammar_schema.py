"""JSON schemas as they are compiled: bounded in what they cost, and without dead ends.

llguidance, which enforces them, refuses keywords that it does not know even where they have no
effect. It allows a comma for a key that a pattern demands where `properties` has taken all such
keys: nothing can follow it then. It compares all key patterns of an object with each other, and
`multipleOf` takes as many states as the number is large.
"""

import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from engine.shared.matchers import is_enforceable, keys_of

MAX_SCHEMA_DEPTH = 120
"""Nesting of a schema's objects and arrays; the library reads few more."""
MAX_MULTIPLE = 100_000
"""Sum of a schema's `multipleOf`, each without its decimal point, and their least common multiple
where they may apply to one value."""
MAX_PATTERNS = 64
"""Patterns of one `patternProperties`. The library intersects each with all others: 64 take 60 ms,
256 take 9 s. Of several, the squares of their numbers count together."""

ENFORCED_FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri",
    "uuid",
})  # fmt: skip
"""Formats of strings that the library knows; others are annotations, as JSON Schema has it."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "items", "prefixItems", "additionalProperties", "additionalItems", "contains", "propertyNames",
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
)  # fmt: skip
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""
_COMBINING = ("allOf", "$ref", "patternProperties")
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})
"""Values of `propertyNames` that all keys fit."""
_MAYBE_IRREGULAR = re.compile(r"\(\?<?[=!]|\\[1-9bBk]")
"""What is in every pattern with look-around, word boundaries or back-references, and in others."""


class BadSchema(ValueError):
    """The schema asks for more than is enforced; the message says what."""


def prepared(schema: Any, *, lenient: bool = False) -> Any:
    """Return a schema that allows the same values and has no dead ends.

    Args:
        schema: decoded; not modified.
        lenient: ignore patterns that cannot be enforced instead of refusing them.

    Raises:
        BadSchema: it is nested too deeply, its multiples or patterns cost too much, or a pattern
            forbids keys that others allow.
    """
    objects = list(_objects(schema))
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
    squares = 0
    for each in objects:
        patterns = each.get("patternProperties")
        if isinstance(patterns, dict):
            squares += len(patterns) ** 2
            forbids = any(pattern is False for pattern in patterns.values())
            if forbids and not lenient and each.get("additionalProperties") is not False:
                raise BadSchema("patternProperties: a pattern that forbids keys cannot be enforced")
    if squares > MAX_PATTERNS**2:
        raise BadSchema(f"patternProperties: more than {MAX_PATTERNS} patterns")
    return _Preparation(lenient).schema(schema)


def closed(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that it lists, where it lists any."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {
        key: {name: closed(each) for name, each in value.items()}
        if key in _MAPS and isinstance(value, dict)
        else value if key in _VALUES else closed(value)
        for key, value in schema.items()
    }  # fmt: skip
    if isinstance(schema.get("properties"), dict):
        changed.setdefault("additionalProperties", False)
    return changed


class _Preparation:
    """Rewrites one schema, from the outside in."""

    def __init__(self, lenient: bool) -> None:
        self._lenient = lenient

    def schema(self, schema: Any) -> Any:
        """Return a schema within the one that is rewritten."""
        if not isinstance(schema, dict):
            return schema
        changed: dict[str, Any] = {}
        for keyword, value in schema.items():
            if _is_needless(keyword, value) or (keyword == "pattern" and self._is_ignored(value)):
                continue
            if keyword in _MAPS and isinstance(value, dict):
                changed[keyword] = {name: self.schema(each) for name, each in value.items()}
            elif keyword in _SCHEMAS and isinstance(value, list):
                changed[keyword] = [self.schema(each) for each in value]
            else:
                changed[keyword] = self.schema(value) if keyword in _SCHEMAS else value
        if isinstance(changed.get("patternProperties"), dict):
            patterns = changed["patternProperties"]
            kept = {name: each for name, each in patterns.items() if not self._is_ignored(name)}
            if len(kept) < len(patterns):  # keys of ignored patterns may have any value
                changed |= {"patternProperties": kept, "additionalProperties": True}
            changed = self._without_dead_ends(changed)
        return changed

    def _is_ignored(self, pattern: Any) -> bool:
        if not self._lenient or not isinstance(pattern, str):
            return False
        maybe = _MAYBE_IRREGULAR.search(pattern) is not None
        return maybe and not is_enforceable(pattern)

    def _without_dead_ends(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return an object's schema with only those patterns that other keys may match."""
        if not isinstance(schema.get("properties"), dict):
            return schema
        properties = dict(schema["properties"])
        names = list(properties)
        kept: dict[str, Any] = {}
        for pattern, wanted in schema["patternProperties"].items():
            matched = keys_of(pattern, names)
            if matched is None:
                kept[pattern] = wanted
            for name in matched or ():
                properties[name] = _both(properties[name], wanted)
        return {**schema, "properties": properties, "patternProperties": kept}


def _both(first: Any, second: Any) -> Any:
    if first == second or first in (True, {}) or second in (True, {}):
        return first if second in (True, {}) else second
    return False if second is False else {"allOf": [first, second]}


def _is_needless(keyword: str, value: Any) -> bool:
    match keyword:
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return value in _ANY_NAME
        case "format":
            return isinstance(value, str) and value not in ENFORCED_FORMATS
    return False


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


def _without_point(multiple: Any) -> int | None:
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
