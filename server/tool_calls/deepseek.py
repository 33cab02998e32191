"""Calls as DeepSeek V3, R1 (0528) and V3.1 models write them, between tokens of their own.

V3 names a kind of tool first and puts the arguments into a block of code:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Oslo"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 leaves both out (between the same marks around all calls):

<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>
"""

import re
from collections.abc import Sequence

from server.answer.parts import CallArguments, CallBegin, ContentText, Part
from server.api.shared.tools import FunctionDefinition
from server.text.markers import MAX_HEAD, find_first, split_at
from server.tool_calls.json_value import JsonValue

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END)
_KIND = re.compile(rf"\s*function\s*{re.escape(SEPARATOR)}")
_NAMED = re.compile(rf"\s*([A-Za-z0-9_.:-]+)\s*(?:{re.escape(SEPARATOR)})?(?:```json)?\s*(?=\{{)")


class DeepSeekParser:
    """Reads content up to the tokens of calls, then each call's name and arguments."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        """`functions` are those that the request allows; a call may name others."""
        self._held = ""
        self._state = self._content
        self._value = JsonValue("{")
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
        if self._state == self._head:
            return [ContentText(CALL_BEGIN + self._held)]
        return []

    # Each state takes the next piece off the held text and returns whether there may be another.

    def _content(self, parts: list[Part]) -> bool:
        """Outside calls: the marks around them are no content."""
        before, mark, self._held = split_at(self._held, _MARKS)
        if before:
            parts.append(ContentText(before))
        if mark == CALL_BEGIN:
            self._state = self._head
        return bool(mark)

    def _head(self, parts: list[Part]) -> bool:
        kind = _KIND.match(self._held)
        named = _NAMED.match(self._held, 0 if kind is None else kind.end())
        if named is not None:
            parts.append(CallBegin(self._count, named[1]))
            self._held, self._state = self._held[named.end() :], self._arguments
            self._value = JsonValue("{")
            return True
        begun = self._held.find("{")
        ended = find_first(self._held, _MARKS)
        if begun < 0 and ended is None and len(self._held) <= MAX_HEAD:
            return False
        parts.append(ContentText(CALL_BEGIN))
        self._state = self._content
        return True

    def _arguments(self, parts: list[Part]) -> bool:
        end = self._value.take(self._held, 0)
        if end:
            parts.append(CallArguments(self._count, self._held[:end]))
            self._held = self._held[end:]
        if self._value.done:
            self._count += 1
            self._state = self._behind_call
        return self._value.done

    def _behind_call(self, parts: list[Part]) -> bool:
        """The end of the block of code and of the call."""
        _, mark, self._held = split_at(self._held, [CALL_END])
        if mark:
            self._state = self._content
        return bool(mark)
