"""Calls as GLM-4.5 and 4.6 models write them: keys and values between tags instead of JSON.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>
"""

import re
from collections.abc import Sequence

from server.answer.parts import CallArguments, CallBegin, ContentText, Part
from server.api.shared.tools import FunctionDefinition
from server.text.markers import MAX_HEAD, Until, certain_length, find_first, split_at
from server.tool_calls.parameters import Parameters

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TAGS = (KEY, KEY_END, VALUE, VALUE_END)

_NAME = re.compile(r"\s*([A-Za-z0-9_.:-]+)\s*(?=<)")
_MAY_BE_NAME = re.compile(r"\s*[A-Za-z0-9_.:-]*\s*")


class Glm45Parser:
    """Reads any number of calls with content around them; `Parameters` reads the values."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        """`functions` are those that the request allows; a call may name others."""
        self._functions = functions
        self._parameters = Parameters(functions, "")
        self._held = ""
        self._state = self._content
        self._tag, self._key = "", ""
        self._text = Until([KEY_END])
        self._count = 0

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        parts: list[Part] = []
        self._held += text
        while self._state(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """End: return what was held back as the content that it is; a call stays unfinished."""
        if self._state == self._content:
            return [ContentText(self._held)] if self._held else []
        if self._state == self._name:
            return [ContentText(START + self._held)]
        return []

    # Each state takes the next piece off the held text and returns whether there may be another.

    def _content(self, parts: list[Part]) -> bool:
        before, tag, self._held = split_at(self._held, [START])
        if tag:
            self._state = self._name
        if before:
            parts.append(ContentText(before))
        return bool(tag)

    def _name(self, parts: list[Part]) -> bool:
        named = _NAME.match(self._held)
        may_be = len(self._held) <= MAX_HEAD
        if named is not None:
            behind = self._held[named.end() :]
            if any(behind.startswith(tag) for tag in (KEY, END)):
                self._parameters = Parameters(self._functions, named[1])
                parts += [CallBegin(self._count, named[1]), CallArguments(self._count, "{")]
                self._held, self._state = behind, self._in_call
                return True
            if may_be and any(tag.startswith(behind) for tag in (KEY, END)):
                return False
        elif may_be and _MAY_BE_NAME.fullmatch(self._held):
            return False
        self._state = self._content
        parts.append(ContentText(START))
        return True

    def _in_call(self, parts: list[Part]) -> bool:
        """Between parameters: what stands there besides tags means nothing."""
        found = find_first(self._held, (KEY, VALUE, END))
        if found is None:
            self._held = self._held[certain_length(self._held, (KEY, VALUE, END)) :]
            return False
        start, tag = found
        if tag == END:
            parts.append(CallArguments(self._count, "}"))
            self._count += 1
            self._held, self._state = self._held[start + len(tag) :], self._content
            return True
        self._tag, self._text = tag, Until([KEY_END if tag == KEY else VALUE_END])
        self._held, self._state = self._held[start + len(tag) :], self._in_text
        return True

    def _in_text(self, parts: list[Part]) -> bool:
        """In a key or a value."""
        found = self._text.push(self._held)
        self._held = ""
        if found is None:
            return False
        text, _, self._held = found
        self._state = self._in_call
        if self._tag == KEY:
            self._key = text.strip()
        else:
            parts.append(CallArguments(self._count, self._parameters.add(self._key, text)))
        return True
