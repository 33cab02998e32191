"""Incremental detection of the end of a JSON value, and JSON text helpers."""

import json
import re

import msgspec

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class JsonValue:
    """The raw text of one JSON value, up to its end."""

    def __init__(self, first: str) -> None:
        self._kind = "string" if first == '"' else "container" if first in "{[" else "scalar"
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False

    def take(self, text: str, start: int) -> int:
        """Consume text from `start` on; return the end of the part that belongs to the value."""
        if self._kind == "scalar":
            match = _SCALAR_END.search(text, start)
            self.done = match is not None
            return len(text) if match is None else match.start()
        position = start
        while position < len(text) and not self.done:
            position = self._next(text, position)
        return position

    def _next(self, text: str, position: int) -> int:
        """Return the position after the next structural character."""
        if self._escaped:
            self._escaped = False
            return position + 1
        match = (_STRING_END if self._in_string else _STRUCTURE).search(text, position)
        if match is None:
            return len(text)
        found = match.group()
        if found == "\\":
            self._escaped = True
        elif found == '"':
            self._in_string = not self._in_string
            self.done = self._kind == "string" and not self._in_string
        elif found in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth == 0
        return match.end()


def json_text(value: object) -> str:
    """Return a value as JSON that can be encoded in UTF-8: lone surrogates stay escaped.

    Raises:
        ValueError: it has no JSON representation.
        TypeError: it has no JSON representation.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value)


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8, i.e. has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
