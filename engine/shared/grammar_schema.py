"""Preparation of JSON schemas for compilation: bounds their cost and removes dead ends.

llguidance, which enforces them, rejects unknown keywords even where they have no effect. It allows
a comma for a key that `patternProperties` matches even if `properties` already covers all such
keys: then nothing can follow the comma. It compares all key patterns of an object pairwise, and
`multipleOf` takes a number of states proportional to its value.
"""

import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from engine.shared.matchers import is_enforceable, keys_of

MAX_SCHEMA_DEPTH = 120
"""Maximum nesting of a schema's objects and arrays; close to the library's own limit."""
MAX_MULTIPLE = 100_000
"""Maximum sum of a schema's `multipleOf` values without their decimal points, and maximum least
common multiple where several can apply to one value."""
MAX_PATTERNS = 64
"""Patterns of one `patternProperties`. The library intersects all pairs: 64 patterns take 60 ms,
256 take 9 s. For several objects, the sum of the squares is limited."""

ENFORCED_FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri",
    "uuid",
})  # fmt: skip
"""String formats that the library enforces; others are annotations, as JSON Schema specifies."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "items", "prefixItems", "additionalProperties", "additionalItems", "contains", "propertyNames",
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
)  # fmt: skip
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are not schemas."""
_COMBINING = ("allOf", "$ref", "patternProperties")
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})
"""Values of `propertyNames` that every key satisfies."""
_MAYBE_IRREGULAR = re.compile(r"\(\?<?[=!]|\\[1-9bBk]")
"""Matches every pattern with look-around, word boundaries or back-references, and some others."""


class BadSchema(ValueError):
    """The schema exceeds what can be enforced; the message says where."""


def prepared(schema: Any, *, lenient: bool = False) -> Any:
    """Return an equivalent schema without dead ends.

    Args:
        schema: decoded; not modified.
        lenient: ignore patterns that cannot be enforced instead of rejecting them.

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
    """Return the schema with additionalProperties false wherever `properties` is present."""
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
    """Rewrites one schema, outermost first."""

    def __init__(self, lenient: bool) -> None:
        self._lenient = lenient

    def schema(self, schema: Any) -> Any:
        """Return a rewritten subschema."""
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
            if len(kept) < len(patterns):  # keys that match ignored patterns can have any value
                changed |= {"patternProperties": kept, "additionalProperties": True}
            changed = self._without_dead_ends(changed)
        return changed

    def _is_ignored(self, pattern: Any) -> bool:
        if not self._lenient or not isinstance(pattern, str):
            return False
        maybe = _MAYBE_IRREGULAR.search(pattern) is not None
        return maybe and not is_enforceable(pattern)

    def _without_dead_ends(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Apply patterns to the listed keys, and keep only those that can match other keys."""
        if not isinstance(schema.get("properties"), dict):
            return schema
        properties = dict(schema["properties"])
        names = list(properties)
        kept: dict[str, Any] = {}
        for pattern, pattern_schema in schema["patternProperties"].items():
            matched = keys_of(pattern, names)
            if matched is None:
                kept[pattern] = pattern_schema
            for name in matched or ():
                properties[name] = _both(properties[name], pattern_schema)
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
    """Yield all JSON objects in a schema; some may be values or maps of schemas."""
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
