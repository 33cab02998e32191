"""Incremental parser of a JSON object with a function's name and arguments."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

from server.answer.json_value import JsonValue, is_unicode, json_text
from server.answer.parameters import Schemas


class CallBody(ABC):
    """Base of incremental parsers of one call.

    The result does not depend on how the text was split into pieces.
    """

    def __init__(self, functions: Schemas, accepts: Callable[[str], bool]) -> None:
        """`functions` are those of the request; `accepts` returns whether a name can be called."""
        self._functions = functions
        self._accepts = accepts
        self._arguments: list[str] = []
        """Argument text not yet taken."""
        self.candidate: str | None = None
        """The name parsed so far; it may still turn out not to be a call."""
        self.name: str | None = None
        """Set once it is certain that this is a call."""
        self.state: Literal["open", "done", "broken", "refused"] = "open"
        """broken: not a call; refused: a JSON object for a function that cannot be called."""

    @property
    @abstractmethod
    def raw(self) -> str:
        """The text consumed before the name was set."""

    @abstractmethod
    def push(self, text: str) -> str:
        """Add text; return the text that follows the call or the rejected candidate."""

    def take_arguments(self) -> str:
        """Return the argument text received since the last call of this method."""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def finish(self) -> None:  # noqa: B027 - most calls that have not ended stay as they are
        """End of input: complete a call that only lacks arguments."""


_WHITESPACE = " \t\r\n"
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")


class CallObject(CallBody):
    """Parses `{"name": ..., "arguments": {...}}` incrementally.

    `name` is set once both the name and the start of the arguments have been read, or the object
    has ended without arguments. Until then it may not be a call; `raw` is the text consumed.
    """

    def __init__(
        self, functions: Schemas, accepts: Callable[[str], bool], *, arguments_required: bool
    ) -> None:
        """With `arguments_required` an object without arguments is not a call."""
        super().__init__(functions, accepts)
        self._arguments_required = arguments_required
        self._expect: Callable[[str, int], int] = self._object_begin
        self._value: JsonValue | None = None
        self._text: list[str] = []
        self._key = ""
        self._has_arguments = False
        self._raw: list[str] = []

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def push(self, text: str) -> str:
        position = 0
        while position < len(text) and self.state == "open":
            position = self._expect(text, position)
        if self.name is None:
            self._raw.append(text[:position])
        may_have_none = self.candidate is not None and not self._arguments_required
        if self.state == "done" and may_have_none and self.name is None:
            self.name = self.candidate
            self._arguments.append("{}")
        return text[position:]

    # Each of these parses the text from a position, and returns the next position.

    def _object_begin(self, text: str, position: int) -> int:
        if text[position] == "{":
            self._expect = self._key_begin
        elif text[position] not in _WHITESPACE:
            return self._break(position)
        return position + 1

    def _key_begin(self, text: str, position: int) -> int:
        character = text[position]
        if character == '"':
            self._begin_value(character, self._in_key)
            return position
        if character == "}":
            self.state = "done"
        elif character not in _WHITESPACE and character != ",":
            return self._break(position)
        return position + 1

    def _in_key(self, text: str, position: int) -> int:
        position = self._take(text, position)
        if self._value is None:
            key = _decoded("".join(self._text))
            if not isinstance(key, str):
                return self._break(position)
            self._key = key
            self._expect = self._colon
        return position

    def _colon(self, text: str, position: int) -> int:
        if text[position] == ":":
            self._expect = self._value_begin
        elif text[position] not in _WHITESPACE:
            return self._break(position)
        return position + 1

    def _value_begin(self, text: str, position: int) -> int:
        character = text[position]
        if character in _WHITESPACE:
            return position + 1
        if character in ",}]:":
            return self._break(position)
        is_arguments = self._key in _ARGUMENT_KEYS and not self._has_arguments
        streamed = is_arguments and character in "{["
        self._begin_value(character, self._in_arguments if streamed else self._in_value)
        if streamed:
            self._has_arguments = True
            self.name = self.candidate
        return position

    def _in_arguments(self, text: str, position: int) -> int:
        end = self._take(text, position)
        self._arguments.append(text[position:end])
        if self._value is None:
            self._expect = self._value_end
        return end

    def _in_value(self, text: str, position: int) -> int:
        end = self._take(text, position)
        if self._value is None:
            self._expect = self._value_end
            if not self._use("".join(self._text)):
                self.state = "refused"
        return end

    def _use(self, value: str) -> bool:
        """Use the value of a key; return whether it is valid for that key."""
        if self._key in _NAME_KEYS and self.candidate is None:
            name = _decoded(value)
            if isinstance(name, dict):  # the nested form of OpenAI's API
                return self._use_inner(name)
            if not isinstance(name, str) or not name or not self._accepts(name):
                return False
            self.candidate = name
            self.name = name if self._has_arguments else None
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            arguments = "{}" if value == "null" else _decoded(value)
            if not isinstance(arguments, str):
                return False
            self._has_arguments = True
            self._arguments.append(arguments)
            self.name = self.candidate
        return True

    def _use_inner(self, function: dict[str, Any]) -> bool:
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str) or not self._accepts(name):
            return False
        self._has_arguments = True
        self._arguments.append(arguments if isinstance(arguments, str) else json_text(arguments))
        self.name = self.candidate = name
        return True

    def _value_end(self, text: str, position: int) -> int:
        character = text[position]
        if character == ",":
            self._expect = self._key_begin
        elif character == "}":
            self.state = "done"
        elif character not in _WHITESPACE:
            return self._break(position)
        return position + 1

    def _begin_value(self, first: str, read: Callable[[str, int], int]) -> None:
        self._value = JsonValue(first)
        self._text = []
        self._expect = read

    def _take(self, text: str, position: int) -> int:
        assert self._value is not None
        end = self._value.take(text, position)
        if self._expect != self._in_arguments:
            self._text.append(text[position:end])
        if self._value.done:
            self._value = None
        return end

    def _break(self, position: int) -> int:
        self.state = "broken"
        return position


def _decoded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(value, str) and not is_unicode(value) else value
