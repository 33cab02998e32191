"""Calls as a name and a JSON object of arguments, with keywords before and between them.

function<｜tool▁sep｜>get_weather
```json
{"city": "Oslo"}
"""

import json
import re
from collections.abc import Callable

import msgspec

from server.answer.call_object import CallBody
from server.answer.json_value import JsonValue
from server.answer.parameters import Schemas
from server.text.markers import MAX_HEAD, MarkerSearch, certain_length, find_first

_WORD = re.compile(r"[\w.:/-]+")
_INDEX = re.compile(r":\d+$")
# Possessive and with optional ends, so that an unterminated string is scanned once.
_LOOSE_WORD = re.compile(r"(\"(?:\\.|[^\"\\])*+\"?)|([^\s{}\[\],:\"]+)(\s*:)?")


class LooseObject:
    """Parses an object in Gemma's notation: JSON without quotes, except for marks around strings.

    {city:<|"|>Oslo<|"|>,days:3}
    """

    def __init__(self, quote: str) -> None:
        """`quote` is the mark around strings."""
        self._quote = quote
        self._marks = (quote, "{", "}", "[", "]")
        self._text: MarkerSearch | None = None
        """Finds the end of the current string, if within one."""
        self._structure: list[str] = []
        """Text since the last string."""
        self._depth = 0
        self._held = ""
        self._json: list[str] = []
        self.done = False

    @property
    def json(self) -> str:
        """The text so far, as JSON."""
        return "".join([*self._json, _quoted("".join(self._structure))])

    def push(self, text: str) -> str:
        """Add text; return the text that follows the object."""
        held, self._held = self._held + text, ""
        while held and not self.done:
            if self._text is not None:
                found = self._text.push(held)
                if found is None:
                    return ""
                self._json.append(json.dumps(found[0], ensure_ascii=False))
                held, self._text = found[2], None
                continue
            mark = find_first(held, self._marks)
            if mark is None:
                length = certain_length(held, self._marks)
                self._structure.append(held[:length])
                self._held = held[length:]
                return ""
            start, character = mark
            end = start + len(character)
            if character == self._quote:
                self._structure.append(held[:start])
                self._json.append(_quoted("".join(self._structure)))
                self._structure, self._text = [], MarkerSearch([self._quote])
            else:
                self._structure.append(held[:end])
                self._depth += 1 if character in "{[" else -1
                self.done = not self._depth
            held = held[end:]
        return held


def _quoted(structure: str) -> str:
    """Return text between strings as JSON: words are quoted, except JSON's constants."""

    def word(match: re.Match[str]) -> str:
        quoted, text, colon = match.groups()
        if quoted is not None or (colon is None and _is_json(text)):
            return match[0]
        return json.dumps(text, ensure_ascii=False) + (colon or "")

    return _LOOSE_WORD.sub(word, structure)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class NamedStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The optional keywords around a name, with whitespace between them."""

    before: str = ""
    identifier: str = ""
    """Keyword after the name, followed by the call's identifier, which is dropped."""
    separator: str = ""
    """Keyword after the name, followed by the arguments, if any."""
    fence: str = ""
    quote: str = ""
    """Mark around strings in arguments in Gemma's notation."""


def known_name(name: str, functions: Schemas) -> str:
    """Return a name as in the request: models add a namespace or a number to it."""
    bare = _INDEX.sub("", name).removeprefix("functions.")
    found = [each for each in (name, bare, name.rpartition(":")[2]) if each in functions]
    return found[0] if found else bare or name


class NamedCall(CallBody):
    """Parses one call; at most `MAX_HEAD` characters can precede its arguments."""

    def __init__(
        self, functions: Schemas, accepts: Callable[[str], bool], style: NamedStyle
    ) -> None:
        """`style` defines the text around the name."""
        super().__init__(functions, accepts)
        self._style = style
        self._value: JsonValue | LooseObject | None = None
        self._may_be_empty = False
        """Whether the separator was read: then this is a call even without arguments."""
        self._held = ""

    @property
    def raw(self) -> str:
        return self._held

    def push(self, text: str) -> str:
        if self._value is None:
            text, self._held = self._held + text, ""
            start = self._arguments_start(text)
            if start is None and len(text) <= MAX_HEAD:
                self._held = text
                return ""
            if start is None or not (text.startswith("{", start) or self._may_be_empty):
                self.state = "broken"
                return text
            text, self.name = text[start:], self.candidate
            if not text.startswith("{"):
                self.finish()
                return text
            quote = self._style.quote
            self._value = LooseObject(quote) if quote else JsonValue("{")
        return self._in_arguments(self._value, text)

    def finish(self) -> None:
        """End of input: a call that ends after its separator has no arguments."""
        if self._value is None and self._may_be_empty:
            self.name = self.candidate
            self._arguments.append("{}")
            self._held, self.state = "", "done"

    def _in_arguments(self, value: JsonValue | LooseObject, text: str) -> str:
        if isinstance(value, JsonValue):
            end = value.take(text, 0)
            self._arguments.append(text[:end])
            rest = text[end:]
        else:
            rest = value.push(text)
            self._arguments += [value.json] if value.done else []
        if value.done:
            self.state = "done"
        return rest

    def _arguments_start(self, text: str) -> int | None:
        """Return the offset of the arguments, None if not certain yet, 0 without callable name."""
        style = self._style
        position = _behind(text, 0, style.before)
        word = None if position is None else _WORD.match(text, position)
        if position in (None, len(text)) or (word is not None and word.end() == len(text)):
            return None
        if word is None:
            return 0
        self.candidate = known_name(word[0], self._functions)
        if not self._accepts(self.candidate):
            return 0
        position = word.end()
        for mark in filter(None, (style.identifier, style.separator, style.fence)):
            behind = _behind(text, position, mark)
            if behind is None:
                return None
            if mark in text[position:behind]:
                self._may_be_empty |= mark == style.separator
                identifier = _WORD.match(text, behind) if mark == style.identifier else None
                behind = behind if identifier is None else identifier.end()
            position = behind
        return _behind(text, position, "")


def _behind(text: str, position: int, mark: str) -> int | None:
    """Return the position after whitespace and an optional mark, None if more text is needed."""
    while position < len(text) and text[position].isspace():
        position += 1
    if mark and text.startswith(mark, position):
        position += len(mark)
        while position < len(text) and text[position].isspace():
            position += 1
        return position
    return None if position == len(text) or mark.startswith(text[position:]) else position
