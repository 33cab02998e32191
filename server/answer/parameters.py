"""Conversion of arguments that models write as plain text, per parameter, to JSON."""

import ast
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from server.answer.json_value import json_text
from server.schema.tools import FunctionDefinition

MAX_CHARACTERS = 1 << 16
"""Limit for parsing, which takes about a hundred times a text's size in memory."""

_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def parsed(text: str) -> ast.expr | None:
    """Parse a text as a Python expression; None if it is not one or is too long."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in models' strings
            return ast.parse(text, mode="eval").body
    except _ERRORS:
        return None


def literal(node: ast.expr) -> object:
    """Return a literal's value; JSON's constants are accepted too.

    Raises:
        ValueError: it is not a literal.
    """
    try:
        return _value(node)
    except _ERRORS as error:
        raise ValueError("not a literal") from error


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    value: object = ast.literal_eval(node)
    return value


_ANY = frozenset(["string", "integer", "number", "boolean", "null", "array", "object"])
_CONSTANTS = {"true": True, "false": False}
_MAX_SCHEMAS = 256
"""Maximum subschemas visited for one parameter: references can be circular."""


class Allowed(msgspec.Struct, frozen=True):
    """The values that a schema allows for one parameter."""

    choices: dict[str, Any]
    """Enumerated values, by their text form."""
    types: frozenset[str]


class Schemas:
    """Parameter schemas of the functions that a request allows, analysed lazily."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        self._roots = {each.name: each.parameters or {} for each in functions}
        self._known: dict[tuple[str, str], Allowed | None] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a function."""
        return name in self._roots

    def allowed(self, name: str, key: str) -> Allowed | None:
        """Return what a schema allows for a parameter, None if it does not name it."""
        if (name, key) not in self._known:
            self._known[name, key] = _allowed(self._roots.get(name, {}), key)
        return self._known[name, key]

    def names(self, name: str) -> list[str]:
        """Return the names of a function's parameters in schema order."""
        root = self._roots.get(name, {})
        return [key for part in _parts(root, root) for key in _properties(part)]


class Parameters:
    """The JSON object of one call's arguments, built parameter by parameter.

    A value's text is read as JSON or as a Python literal if the function's schema allows the
    resulting type, else as a string.
    """

    def __init__(self, schemas: Schemas, name: str) -> None:
        """`name` is the called function; it need not be one of the request's."""
        self._schemas = schemas
        self._name = name
        self._count = 0

    def has(self, key: str) -> bool:
        """Return whether the function's schema names a parameter."""
        return self._schemas.allowed(self._name, key) is not None

    def add(self, key: str, text: str, *, is_text: bool = False) -> str:
        """Return the JSON text of another parameter, including the separator before it.

        Args:
            is_text: whether the model marked the value as a string.
        """
        separator = ", " if self._count else ""
        self._count += 1
        value = text if is_text else self._value(key, text)
        return f"{separator}{json_text(key)}: {json_text(value)}"

    def _value(self, key: str, text: str) -> Any:
        allowed = self._schemas.allowed(self._name, key)
        if allowed is None:
            return _converted(text, _ANY)
        for spelled in (text, text.strip()):
            if spelled in allowed.choices:
                return allowed.choices[spelled]
        return _converted(text, allowed.types)


def _properties(part: dict[str, Any]) -> dict[str, Any]:
    properties = part.get("properties")
    return properties if isinstance(properties, dict) else {}


def _allowed(root: dict[str, Any], key: str) -> Allowed | None:
    choices: dict[str, Any] = {}
    types: set[str] = set()
    found = [_properties(part)[key] for part in _parts(root, root) if key in _properties(part)]
    for part in [part for schema in found for part in _parts(root, schema)]:
        listed = part.get("enum")
        listed = [*(listed if isinstance(listed, list) else ())]
        listed += [part["const"]] if "const" in part else []
        for value in listed:
            texts = [value] if isinstance(value, str) else [json.dumps(value), repr(value)]
            choices.update({text: value for text in texts if text not in choices})
        named = part.get("type")
        if named is not None:
            types.update(map(str, named if isinstance(named, list) else [named]))
        elif listed:
            types.update(map(_type_of, listed))
        elif not part.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
            types |= _ANY
    return Allowed(choices, frozenset(types) & _ANY or _ANY) if found else None


def _parts(root: dict[str, Any], schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and its subschemas, following references; `root` is the whole schema."""
    pending, seen = [schema], 0
    while pending and seen < _MAX_SCHEMAS:
        part = pending.pop()
        seen += 1
        if not isinstance(part, dict):
            continue
        yield part
        for keyword in ("anyOf", "oneOf", "allOf"):
            branches = part.get(keyword)
            pending += branches if isinstance(branches, list) else []
        pending.append(_referred(root, part.get("$ref")))


def _referred(root: dict[str, Any], reference: object) -> Any:
    """Return the target of a reference within a schema, None if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _converted(text: str, types: frozenset[str]) -> Any:
    spelled = text.strip()
    if "null" in types and spelled in ("null", "None"):
        # without type restrictions only JSON's own spelling of constants counts
        return text if spelled == "None" and types == _ANY else None
    others = types - {"string", "null"}
    if not others:
        return text
    if "boolean" in others and types != _ANY and spelled.lower() in _CONSTANTS:
        return _CONSTANTS[spelled.lower()]
    value = _decoded(spelled)
    if isinstance(value, str) and "string" not in types:
        inner = _decoded(value)
        value = value if inner is None else inner
    if value is None and types != _ANY and others & {"array", "object"}:
        value = _python(spelled)
    kind = _type_of(value)
    if kind == "number" and "number" not in others and value == int(value):
        return int(value)
    fits = kind in others or (kind == "integer" and "number" in others)
    if types == _ANY:
        return text if value is None and spelled != "null" else value
    return value if fits or (value is not None and "string" not in types) else text


def _decoded(text: str) -> Any:
    try:
        value = json.loads(text)
        json_text(value)
    except (ValueError, RecursionError):
        return None
    return value


def _python(text: str) -> Any:
    node = parsed(text)
    if node is None:
        return None
    try:
        value = literal(node)
        json_text(value)
    except (ValueError, TypeError, RecursionError):
        return None
    return value


_TYPES = {
    type(None): "null",
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}


def _type_of(value: object) -> str:
    return _TYPES.get(type(value), "")
