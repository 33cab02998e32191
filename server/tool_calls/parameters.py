"""Arguments that models write as text, parameter by parameter, as the JSON that clients expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.api.shared.tools import FunctionDefinition
from server.tool_calls.json_value import json_text


class Parameters:
    """The JSON object of one call's arguments, built as its parameters come.

    A value is text if the function's schema says so or if it is no JSON, else the JSON value that
    it spells.

    Args:
        functions: those that the request allows.
        name: the function that is called; it need not be one of them.
    """

    def __init__(self, functions: Sequence[FunctionDefinition], name: str) -> None:
        schema: Mapping[str, Any] = next(
            (each.parameters or {} for each in functions if each.name == name), {}
        )
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._count = 0

    def add(self, key: str, text: str) -> str:
        """Return the JSON text of one more parameter, with the separator before it."""
        separator = ", " if self._count else ""
        self._count += 1
        value = json_text(self._value(key, text))
        return f"{separator}{json_text(key)}: {value}"

    def _value(self, key: str, text: str) -> Any:
        schema = self._properties.get(key)
        types = schema.get("type") if isinstance(schema, dict) else None
        if types == "string" or (isinstance(types, list) and "string" in types and text != "null"):
            return text
        try:
            value = json.loads(text)
            json_text(value)
        except (ValueError, RecursionError):
            return text
        return value
