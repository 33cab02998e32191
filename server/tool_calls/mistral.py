"""Calls as Mistral models write them: behind a marker, as an array or name by name.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}
"""

import re
from collections.abc import Sequence

from server.answer.parts import CallArguments, CallBegin, ContentText, Part
from server.api.shared.tools import FunctionDefinition
from server.text.markers import MAX_HEAD, split_at
from server.tool_calls.call_list import CallListParser
from server.tool_calls.json_value import JsonValue

MARKER, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"

_NAME = r"\s*[A-Za-z0-9_.:-]+\s*"
_NAMED = re.compile(rf"({_NAME})(?:\[ARGS\]\s*)?(?=\{{)")
_PARTS_OF_MARK = "|".join(re.escape(ARGUMENTS[:end]) for end in range(len(ARGUMENTS), 0, -1))
_MAY_BE_NAMED = re.compile(rf"\s*(?:{_NAME}(?:\[ARGS\]\s*|{_PARTS_OF_MARK})?)?")


class MistralParser:
    """Reads content up to a marker, and what follows a marker as one call or as a list of calls."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        """`functions` are those that the request allows; a call may name others."""
        self._held = ""
        self._marked = False
        self._list: CallListParser | None = None
        self._value: JsonValue | None = None
        self._count = 0

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        if self._list is not None:
            return self._list.push(text)
        parts: list[Part] = []
        self._held += text
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """End: return what was held back as the content that it is."""
        if self._list is not None:
            return self._list.finish()
        left = MARKER + self._held if self._marked else self._held
        return [ContentText(left)] if left else []

    def _advance(self, parts: list[Part]) -> bool:
        """Take the next piece off the held text; return whether there may be another."""
        if self._value is not None:
            return self._arguments(self._value, parts)
        if self._marked:
            return self._behind_marker(parts)
        before, marker, self._held = split_at(self._held, [MARKER])
        if before:
            parts.append(ContentText(before))
        self._marked = bool(marker)
        return self._marked

    def _behind_marker(self, parts: list[Part]) -> bool:
        """Find out what follows a marker; return whether that is known."""
        named = _NAMED.match(self._held)
        if named is not None:
            parts.append(CallBegin(self._count, named[1].strip()))
            self._held = self._held[named.end() :]
            self._value = JsonValue("{")
        elif not self._count and self._held.lstrip().startswith("["):
            self._list = CallListParser(" \t\r\n[],")
            held, self._held = self._held, ""
            parts += self._list.push(held)
            return False
        elif len(self._held) <= MAX_HEAD and _MAY_BE_NAMED.fullmatch(self._held):
            return False
        else:
            parts.append(ContentText(MARKER))
        self._marked = False
        return True

    def _arguments(self, value: JsonValue, parts: list[Part]) -> bool:
        end = value.take(self._held, 0)
        if end:
            parts.append(CallArguments(self._count, self._held[:end]))
            self._held = self._held[end:]
        if value.done:
            self._value = None
            self._count += 1
        return value.done
